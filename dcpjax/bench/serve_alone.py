"""What the server itself costs, with an engine that costs nothing: beside the least that its framework could do.

Arms, each a process of its own, asked in turn by one client of bare sockets:

* *constant*: FastAPI with the same body model, answering a constant; *echo*: our server, the same request;
* *bare*: an application without a framework that sends the very chunks that our server sends, each in a turn of the
  event loop of its own, as tokens come; *stream*: our server.

Figures are ratios of requests and chunks per second, and the server's own CPU time: a request's fixed part and the part
that grows with its prompt (from prompts of two lengths), and a streamed token's with both parsers at work (from answers of
one token and of many to the same prompt); last, the longest wait for a chunk of a stream while a prompt of a megabyte
comes in.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import uvloop

from dcpjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sizes:
    """rounds: of which medians are taken. clients: at a time. requests, streams: of a round. short, long: words of prompts.
    tokens: of a streamed answer, about. bytes: of the prompt beside a stream."""

    rounds: int = 3
    clients: int = 32
    requests: int = 400
    streams: int = 128
    short: int = 16
    long: int = 1500
    tokens: int = 400
    bytes: int = 1_000_000


QUICK = Sizes(rounds=1, clients=2, requests=8, streams=2, short=4, long=50, tokens=10, bytes=10_000)

_CONSTANT = """
import fastapi, sys, uvicorn, socket
from starlette.requests import Request
from starlette.responses import Response
from dcpjax.server.protocol import ChatBody, read_body
app = fastapi.FastAPI(docs_url=None, redoc_url=None)
@app.post("/v1/chat/completions")
async def answer(request: Request):
    await read_body(request, ChatBody, 1 << 25)
    return Response(b'{"choices":[]}', media_type="application/json")
"""
_BARE = """
import asyncio, sys, uvicorn, socket
chunks = open(sys.argv[1], "rb").read().split(b"\\n\\n")[:-1]
async def app(scope, receive, send):
    if scope["type"] != "http": return
    while (await receive()).get("more_body"): pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk + b"\\n\\n", "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})
"""
_SERVE = """
listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(f"Ready: http://127.0.0.1:{listener.getsockname()[1]} ", flush=True)
config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
uvicorn.Server(config).run(sockets=[listener])
"""


def measure(sizes: Sizes, say=lambda line: None) -> dict[str, Any]:
    """Figures, as in the module's text. Raises `ConfigError` without FastAPI, which the constant arm is made of."""
    if importlib.util.find_spec("fastapi") is None:
        raise ConfigError("serve --alone: one arm needs FastAPI; install the extra: make setup EXTRAS=test,bench")
    with _process("-m", "dcpjax.serve", "--engine", "echo", "--port", "0", "--max-model-len", "4096") as echo:
        constant_arm = _process("-c", _CONSTANT + _SERVE)
        with constant_arm as constant:
            plain = _chat("Hello there", stream=False)
            rates = _in_turn({"echo": (echo, plain), "constant": (constant, plain)}, sizes, sizes.requests)
        figures: dict[str, Any] = {"requests_per_second": rates, "requests_ratio": rates["echo"] / rates["constant"]}
        say(
            f"requests/s: echo {rates['echo']:.0f}, constant {rates['constant']:.0f}, ratio {figures['requests_ratio']:.2f} (at least 0.25)"
        )
        stream = _chat("hm</think>" + "word and " * (sizes.tokens // 2), stream=True)
        sent = asyncio.run(_once(echo.port, stream))
        chunks = _body(sent).count(b"data: ")
        with tempfile.NamedTemporaryFile() as file:
            file.write(_body(sent))
            file.flush()
            with _process("-c", _BARE + _SERVE, file.name) as bare:
                rates = _in_turn({"stream": (echo, stream), "bare": (bare, stream)}, sizes, sizes.streams)
        rates = {name: rate * chunks for name, rate in rates.items()}
        figures |= {"chunks_per_second": rates, "chunks_ratio": rates["stream"] / rates["bare"]}
        say(
            f"chunks/s: echo {rates['stream']:.0f}, bare {rates['bare']:.0f}, ratio {figures['chunks_ratio']:.2f} (at least 0.25)"
        )
        figures |= _cpu(echo, chunks, sizes)
    say(
        f"CPU: {figures['ms_a_request']:.2f} ms a request (at most 1) + {figures['us_a_prompt_token']:.2f} us a prompt token "
        f"(at most 1): {figures['ms_a_long_request']:.2f} ms for {sizes.long} tokens (at most {1 + sizes.long / 1e3:.2f}); "
        f"{figures['us_a_streamed_token']:.1f} us a streamed token (at most 30)"
    )
    with _process("-m", "dcpjax.serve", "--engine", "echo", "--port", "0", "--max-model-len", "1M") as echo:
        gaps = [asyncio.run(_gap(echo.port, sizes.bytes, i)) for i in range(2 * sizes.rounds + 1)]
    figures |= {"gap_ms": statistics.median(gaps), "gaps_ms": gaps}
    say(
        f"longest wait for a chunk beside a prompt of {sizes.bytes:,} bytes: {figures['gap_ms']:.0f} ms (at most 50), median of "
        f"{', '.join(f'{gap:.0f}' for gap in gaps)}"
    )
    return figures


class _Arm:
    def __init__(self, process: subprocess.Popen, port: int):
        self.process, self.port = process, port

    def cpu(self) -> float:
        """Seconds of processor time so far, of the process and its children."""
        parents, ticks = {}, {}
        for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                fields = file.read_text().rpartition(")")[2].split()
                parents[file.parent.name], ticks[file.parent.name] = fields[1], int(fields[11]) + int(fields[12])
        own = {str(self.process.pid)}
        own |= {pid for pid, parent in parents.items() if parent in own}
        return sum(ticks[pid] for pid in own) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[_Arm]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        yield _Arm(process, int(re.search(r":(\d+) ", line)[1]))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        process.stdout.close()


def _chat(text: str, stream: bool, **more: Any) -> bytes:
    """A plain question; one whose answer is streamed has tools, so that both parsers are at work."""
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
    body = {"messages": [{"role": "user", "content": text}], "stream": stream, **(tools if stream else {}), **more}
    data = json.dumps(body).encode()
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + data


def _in_turn(arms: dict[str, tuple[_Arm, bytes]], sizes: Sizes, requests: int) -> dict[str, float]:
    """Median requests per second of each arm."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(sizes.rounds + 1):
        for name, (arm, request) in arms.items():
            start = time.perf_counter()
            uvloop.run(_load(arm.port, request, requests, sizes.clients))
            if number:  # the first round warms up
                rates[name].append(requests / (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in rates.items()}


def _cpu(echo: _Arm, chunks: int, sizes: Sizes) -> dict[str, float]:
    def seconds(request: bytes, requests: int) -> float:
        before = echo.cpu()
        uvloop.run(_load(echo.port, request, requests, sizes.clients))
        return (echo.cpu() - before) / requests

    # Each prompt is another one: tokenised, hashed and stored anew.
    short, long = (
        seconds(_chat("a " * n, stream=False, max_tokens=1), sizes.requests) for n in (sizes.short, sizes.long)
    )
    # The answer repeats its prompt, which is paid for by its first token.
    asked = "hm</think>" + "word and " * (sizes.tokens // 2)
    whole, begun = (seconds(_chat(asked, stream=True, **more), sizes.streams) for more in ({}, {"max_tokens": 1}))
    return {
        "ms_a_request": short * 1e3,
        "ms_a_long_request": long * 1e3,
        "us_a_prompt_token": (long - short) / (sizes.long - sizes.short) * 1e6,
        "us_a_streamed_token": (whole - begun) / chunks * 1e6,
    }


async def _load(port: int, request: bytes, requests: int, clients: int) -> None:
    """Sends `request` so many times, `clients` at a time."""
    loop, left = asyncio.get_running_loop(), iter(range(requests))
    made = [await loop.create_connection(lambda: _Client(request, left), "127.0.0.1", port) for _ in range(clients)]
    await asyncio.gather(*(client.done for _, client in made))


class _Client(asyncio.Protocol):
    """Asks again and again while there is something left. It does as little as it can: it has the server's processors."""

    def __init__(self, request: bytes, left: Iterator[int]):
        self.done = asyncio.get_running_loop().create_future()
        self._request = request
        self._left = left
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._to_come: int | None = None  # bytes of the answer; None: until its last chunk
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._begin(head)
        if self._to_come is None:
            self._tail = (self._tail + data)[-5:] if len(data) < 5 else data[-5:]
            over = self._tail == b"0\r\n\r\n"
        else:
            self._to_come -= len(data)
            over = self._to_come <= 0
        if over:
            self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or RuntimeError("the server hung up"))

    def _ask(self) -> None:
        if next(self._left, None) is None:
            self.done.set_result(None)
            self._transport.close()
            return
        self._head = self._tail = b""
        self._transport.write(self._request)

    def _begin(self, head: bytes) -> None:
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode()[:200])
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        self._head, self._to_come = None, int(length[1]) if length else None


async def _gap(port: int, size: int, number: int) -> float:
    """Milliseconds; prompts of other numbers have no prefix in common."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_chat("a " * 100, stream=True, max_tokens=100_000, ignore_eos=True))
    for _ in range(20):  # it runs
        await reader.readuntil(b"\n\n")
    text = "The quick brown fox jumps over the lazy dog, and then it sleeps. "
    other = asyncio.ensure_future(
        _once(port, _chat(f"{number} " + text * (size // len(text)), stream=False, max_tokens=1))
    )
    longest, last = 0.0, time.perf_counter()
    while not other.done():
        await reader.readuntil(b"\n\n")
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await other
    writer.close()
    await writer.wait_closed()
    return longest * 1e3


async def _once(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    data = await _answer(reader)
    writer.close()
    await writer.wait_closed()
    return data


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The raw body of one answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.decode()[:200])
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    if length:
        return await reader.readexactly(int(length[1]))
    pieces = []
    while True:
        pieces.append(await reader.read(1 << 16))
        if pieces[-1].endswith(b"0\r\n\r\n") or not pieces[-1]:
            return b"".join(pieces)


def _body(chunked: bytes) -> bytes:
    """Chunked transfer coding taken off."""
    body, at = b"", 0
    while True:
        end = chunked.index(b"\r\n", at)
        size = int(chunked[at:end], 16)
        if not size:
            return body
        body += chunked[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
