"""Clients that leave, read slowly, abort, reset and send rubbish; afterwards nothing is left of them."""

import asyncio
import contextlib
import pathlib
import random
import time

import httpx
import pytest

from tests.server.process import EchoProcess, metric, wait_for

CLIENTS = 16
PROBE = {"prompt": "The probe is long enough for several pages. " * 6, "max_tokens": 40, "temperature": 0}
FLAGS = (
    "--max-model-len", "1024", "--block-size", "16", "--num-gpu-blocks-override", "80", "--max-num-seqs", "12",
    "--max-request-body-bytes", "100000", "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}',
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
CALL = "hm</think>Wait. <tool_call>now</tool_call>"


def wish(rng: random.Random) -> tuple[str, dict]:
    """A path and a body."""
    text = " ".join(rng.choices(["alpha", "beta", "gamma", "delta", "naïve 🙂"], k=rng.randrange(1, 80)))
    common = {"stream": rng.random() < 0.8, "max_tokens": rng.randrange(1, 160)}
    match rng.randrange(5):
        case 0:
            return "/v1/completions", {**common, "prompt": text, "n": rng.choice([1, 1, 3]), "ignore_eos": True}
        case 1:
            return "/v1/completions", {**common, "prompt": text, "guided_regex": "[a-z ]{5,40}"}
        case 2:
            return "/v1/messages", {**common, "messages": [{"role": "user", "content": text}]}
        case 3:
            return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": CALL}], "tools": TOOLS}
    return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}], "logprobs": True}


async def one(client: httpx.AsyncClient, rng: random.Random) -> None:
    path, body = wish(rng)
    action = rng.random()
    if action < 0.03:
        await client.post("/reset_prefix_cache", params={"reset_running_requests": rng.random() < 0.5})
        return
    if action < 0.06:
        assert (await client.post(path, json={**body, "more": "x" * 100_000})).status_code == 413
        return
    if action < 0.09:
        assert (await client.post(path, content=b"{", headers={"content-type": "application/json"})).status_code == 400
        return
    name = f"id-{rng.randrange(10**9)}"
    leave_after = rng.randrange(1, 30) if action < 0.5 else None
    async with client.stream("POST", path, json=body, headers={"X-Request-Id": name}) as response:
        assert response.status_code == 200, await response.aread()
        number = 0
        async for _ in response.aiter_lines():
            number += 1
            if number == leave_after:
                return  # without a word
            if rng.random() < 0.01:
                await asyncio.sleep(rng.random() * 0.2)
            if rng.random() < 0.003:
                await client.post("/abort_requests", json={"request_ids": [name]})


async def misbehave(url: str, seconds: float, number: int) -> None:
    rng, end = random.Random(number), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        while time.monotonic() < end:
            if rng.random() < 0.3:  # a client that hangs up altogether
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(one(client, rng), rng.random() * 0.2)
            else:
                await one(client, rng)


def memory(server: EchoProcess) -> int:
    """Resident bytes of the server's processes."""
    return sum(int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in server.processes())


def soak(warm_seconds: float, seconds: float) -> None:
    async def run(duration: float, start: int) -> None:
        await asyncio.gather(*(misbehave(server.url, duration, start + number) for number in range(CLIENTS)))

    with EchoProcess(*FLAGS) as server, server.client() as client:
        first = client.post("/v1/completions", json=PROBE).json()["choices"]
        asyncio.run(run(warm_seconds, 0))
        before = memory(server)
        asyncio.run(run(seconds, CLIENTS))
        after = memory(server)
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 0, 10)
        assert metric(client, "vllm:num_requests_waiting") == 0 and client.get("/load").json() == {"server_load": 0}
        assert client.post("/reset_prefix_cache").status_code == 200
        info = client.get("/server_info").json()
        assert info["num_free_blocks"] == info["num_blocks"]
        answers = [client.post("/v1/completions", json=PROBE).json() for _ in range(2)]
        assert [answer["choices"] for answer in answers] == [first, first]
        usage = answers[1]["usage"]
        cached = min(usage["prompt_tokens"] // 16 * 16, usage["prompt_tokens"] - 1)
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert metric(client, "vllm:num_preemptions_total") > 0 and metric(client, "vllm:request_success_total") > 100
        assert "Traceback" not in "".join(server.stderr), "".join(server.stderr)[-3000:]
        assert abs(after - before) <= 0.05 * before, (before, after)


def test_a_minute():
    soak(25, 35)


@pytest.mark.soak
def test_five_minutes():
    soak(60, 240)
