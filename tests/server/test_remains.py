"""What a request leaves: nothing that waits for the collector, however it ended. Bodies and prompts would wait with it."""

import asyncio
import contextlib
import gc
import json
import socket
import struct
import threading
import weakref

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from dcpjax.server.app import make_app
from dcpjax.server.arguments import parse
from dcpjax.server.connection import Connection
from dcpjax.server.echo import EchoLLM
from dcpjax.server.engine_client import EngineClient
from dcpjax.server.engine_side import Channel, EngineSide
from dcpjax.server.service import Service
from tests.server.in_thread import InThread

SETTINGS = parse(
    [
        *("--engine", "echo", "--max-model-len", "256", "--block-size", "16", "--max-request-body-bytes", "9000"),
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'),
    ]
)
CHAT, COMPLETION, ROUNDS = "/v1/chat/completions", "/v1/completions", 4
MESSAGES = {"messages": [{"role": "user", "content": "Hello. " * 8}], "max_tokens": 40}
PROMPT = {"prompt": "Hello. " * 8, "max_tokens": 40}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}]
CALL = {"role": "user", "content": "hm</think>Wait. <tool_call>now<arg_key>place</arg_key><arg_value>here"}
REQUESTS = {
    "text": (COMPLETION, PROMPT),
    "two texts": (COMPLETION, {**PROMPT, "n": 2, "logprobs": 2, "temperature": 1}),
    "a form": (COMPLETION, {**PROMPT, "guided_regex": "[a-z ]{5,9}"}),
    "turn": (CHAT, {**MESSAGES, "logprobs": True}),
    "call": (CHAT, {"messages": [CALL], "tools": TOOLS}),
    "forced call": (CHAT, {**MESSAGES, "tools": TOOLS, "tool_choice": "required"}),
    "message": ("/v1/messages", MESSAGES),
    "response": ("/v1/responses", {"input": "Hello.", "max_output_tokens": 20}),
    "too long": (COMPLETION, {"prompt": [5] * 300}),
    "too big": (COMPLETION, {"prompt": "x" * 10_000}),
    "odd form": (COMPLETION, {**PROMPT, "guided_regex": "("}),
    "odd messages": (CHAT, {"messages": [{"role": "nobody", "content": "?"}]}),
    "odd field": (CHAT, {**MESSAGES, "temperature": "warm"}),
    "unknown": ("/v1/nothing", {}),
    "count": ("/v1/messages/count_tokens", {"messages": MESSAGES["messages"]}),
    "tokens": ("/tokenize", PROMPT),
    "reset": ("/reset_prefix_cache", {}),
}


class Exchange:
    """One request as the server below the application holds it: all in one object. leave_after: messages of the answer
    after which the client is gone; None: it stays."""

    def __init__(self, path: str, body: dict, leave_after: int | None = None):
        self.body = json.dumps(body).encode()
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        self.leave_after = leave_after
        self.status = None
        self.left = asyncio.Event()

    async def receive(self) -> dict:
        if self.body is None:
            await self.left.wait()
            return {"type": "http.disconnect"}
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: dict) -> None:
        self.status = message.get("status", self.status)
        if self.leave_after is not None:
            self.leave_after -= 1
            if self.leave_after <= 0:
                self.left.set()


@pytest.fixture(scope="module")
def left():
    """Asks for something several times; (status, objects that the collector found afterwards)."""
    service = Service(SETTINGS.options)

    def work(channel: Channel) -> None:
        side = EngineSide(EchoLLM(SETTINGS.llm), SETTINGS.options, channel.send)
        threading.Thread(target=channel.listen, args=(side.hear,)).start()
        channel.send(side.facts())
        side.run()

    async def open_app(process: InThread):
        engine = EngineClient(process, SETTINGS.options.ticket_limits, lambda: None)
        service.open(await engine.loaded(), engine)
        return make_app(service)

    async def ask(path: str, body: dict, leave_after: int | None) -> int:
        exchange = Exchange(path, body, leave_after)
        if leave_after == 0:
            exchange.left.set()
        await app(exchange.scope, exchange.receive, exchange.send)
        return exchange.status

    async def count(path: str, body: dict, leave_after: int | None = None) -> tuple[int, int]:
        await ask(path, body, leave_after)  # what is made once
        await asyncio.sleep(0.02)
        gc.collect()
        gc.freeze()  # or it looks at all that was ever imported
        gc.disable()
        try:
            statuses = [await ask(path, body, leave_after) for _ in range(ROUNDS)]
            await asyncio.sleep(0.02)  # tasks that were cancelled, requests that are dropped
            return statuses[-1], gc.collect()
        finally:
            gc.enable()

    with InThread(work) as process, asyncio.Runner() as runner:
        app = runner.run(open_app(process))
        yield lambda *request: runner.run(count(*request))
        assert runner.run(service.served.engine.close(seconds=10))
    gc.unfreeze()


@pytest.mark.parametrize("name", REQUESTS)
def test_nothing_waits_for_the_collector(left, name):
    path, body = REQUESTS[name]
    status, found = left(path, body)
    assert found < ROUNDS, "objects that know one another"
    if status == 200 and "max_tokens" in body:
        endless = {**body, "ignore_eos": True}
        assert left(path, {**endless, "stream": True}, 3)[1] < ROUNDS, "of who left while it was streamed"
        assert left(path, endless, 0)[1] < ROUNDS, "of who left at once"


def test_a_connection_that_is_reset_is_forgotten():
    """While it idles after an answer: uvicorn has a timer for it then, which knows the connection."""
    made: list[weakref.ref[Connection]] = []
    config = uvicorn.Config(PlainTextResponse("hello"), http=Connection, log_config=None, timeout_keep_alive=600)
    config.load()

    def make() -> Connection:
        connection = Connection(config, ServerState(), {})
        made.append(weakref.ref(connection))
        return connection

    async def reset() -> None:
        listener = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        async with listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
            assert made[0]().timeout_keep_alive_task is not None
            # To close without lingering is to reset.
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    while made[0]() is not None:
                        await asyncio.sleep(0.01)
        assert made[0]() is None

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(reset())
