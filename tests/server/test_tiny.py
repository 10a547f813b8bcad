"""The main job: `make serve`, then chats with the trained tiny model whose cache is dealt out to four ranks."""

import concurrent.futures
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import threading

import httpx
import openai
import pytest

from models.train import tables
from tests.server.process import metric

ROOT = pathlib.Path(__file__).parent.parent.parent


class Made:
    """`make serve` in a process group of its own, on a free port."""

    def __init__(self, *flags: str):
        self.process = subprocess.Popen(
            ["make", "serve", f"ARGS=--port 0 {' '.join(flags)}"],
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = ""
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.fullmatch(r"Ready: (http://\S+) \(model \S+, [\d.]+ s\)\n", line):
                self.url = found[1]
                break
        assert self.url, "".join(self.lines)
        # Somebody must go on reading, or the server stops at a full pipe.
        self.reader = threading.Thread(target=self.lines.extend, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def stop(self) -> int:
        """SIGINT to the whole group, as a terminal sends it; the exit code of make."""
        os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(30)
        self.reader.join(5)
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def server():
    made = Made("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    yield made
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()
        made.process.stdout.close()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_streamed_chat_says_what_an_unstreamed_one_says(client):
    wish = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_completion_tokens": 96,
    }
    whole = client.chat.completions.create(**wish)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    reasoning, content = "", ""
    for chunk in client.chat.completions.create(**wish, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
    assert content == whole.choices[0].message.content
    assert reasoning == (whole.choices[0].message.model_extra.get("reasoning_content") or "")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_look_up_in_two_thousand_tokens_is_right(client, server, seed):
    rng = random.Random(seed)
    table = tables.table(rng, 260, digits=4)
    name, code = table.entries[rng.randrange(10, 50)]

    def messages(lines: int) -> list[dict[str, str]]:
        text = "\n".join(table.text.split("\n")[: lines + 1])
        return [{"role": "user", "content": f"{text}\n\nWhat is the code of {name}?"}]

    def tokens(lines: int) -> int:
        return httpx.post(f"{server.url}/tokenize", json={"messages": messages(lines)}, timeout=30).json()["count"]

    lines = next(n for n in range(60, 261) if tokens(n) >= 2010)
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages(lines),
        temperature=0,
        max_completion_tokens=64,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.usage.prompt_tokens >= 2000
    assert code in answer.choices[0].message.content, (name, code, answer.choices[0].message.content)


def test_drafts_and_the_prefix_cache_are_at_work(client, server):
    """The second time all whole pages of 64 tokens are reused, the text is the same, and so is what drafts bring."""
    table = tables.table(random.Random(9), 12, digits=4)
    wish = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{table.text}\n\nWhat is the code of {table.entries[3][0]}?"}],
        "temperature": 0,
        "max_completion_tokens": 48,
    }
    cold, warm = (client.chat.completions.create(**wish) for _ in range(2))
    length = cold.usage.prompt_tokens
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == min(length // 64 * 64, length - 1) > 0
    assert warm.choices == cold.choices
    details = cold.usage.completion_tokens_details
    assert details == warm.usage.completion_tokens_details and details.accepted_prediction_tokens > 0
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    assert client.chat.completions.create(**wish).usage.prompt_tokens_details.cached_tokens == 0


def test_without_a_seed_no_two_answers_are_alike(client):
    wish = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 1}
    answers = [client.chat.completions.create(**wish, max_tokens=16).choices[0].message for _ in range(2)]
    assert answers[0] != answers[1]


def test_a_profile_while_a_request_runs(client, server, tmp_path):
    assert httpx.post(f"{server.url}/stop_profile").status_code == 400
    folder = pathlib.Path(httpx.post(f"{server.url}/start_profile", timeout=60).json()["folder"])
    refused = httpx.post(f"{server.url}/start_profile")
    assert refused.status_code == 409 and str(folder) in refused.json()["error"]["message"]
    ask(client, 1)
    assert httpx.post(f"{server.url}/stop_profile", timeout=60).json() == {"folder": str(folder)}
    (trace,) = folder.rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    shutil.rmtree(folder)


def test_the_tokens_of_a_request_are_dealt_out_to_four_ranks(client, server):
    """Those of a prompt, while its answer is streamed; and every device holds weights and cache."""
    prompt = [500 + i % 97 for i in range(400)]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        # So long that it runs while somebody looks; it ends with the connection.
        body = {"prompt": prompt, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.iter_lines()  # kept: without it the connection is closed
            next(chunks)
            with httpx.Client(base_url=server.url, timeout=60) as other:
                lines = other.get("/metrics").text.splitlines()
                held, memory = (
                    [float(line.split()[-1]) for line in lines if line.startswith(f"dcpjax:{name}{{")]
                    for name in ("kv_tokens_per_rank", "device_memory_bytes")
                )
                assert len(held) == 4 and min(held) >= 100 and max(held) - min(held) <= 1
                assert len(memory) == 4 and min(memory) > 1e6
                assert metric(other, "dcpjax:compiled_shapes") > 3 and metric(other, "dcpjax:compile_seconds_total") > 0


def ask(client, i: int) -> tuple[str, list[int]]:
    """Greedy or with a seed, by turns; the text and its tokens."""
    word = ["capital", "colour", "sum", "story", "list"][i % 5]
    wish = {"temperature": 0} if i % 2 else {"temperature": 1, "seed": i}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"Tell me about the {word} number {i}."}],
        max_completion_tokens=24,
        extra_body={"return_token_ids": True},
        **wish,
    )
    choice = answer.choices[0]
    return choice.message.content, choice.model_extra["token_ids"]


def test_twenty_at_once_beside_a_long_prompt(client, server):
    """In company, with drafts, a prefix cache and a prompt of 3,000 tokens in chunks: the texts of one at a time."""
    alone = [ask(client, i) for i in range(20)]
    assert len({tuple(tokens) for _, tokens in alone}) > 15, "they differ, or this shows little"
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    long = {"prompt": [500 + i % 997 for i in range(3000)], "max_tokens": 2, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(21) as pool:
        first = pool.submit(httpx.post, f"{server.url}/v1/completions", json=long, timeout=120)
        together = list(pool.map(lambda i: ask(client, i), range(20)))
        assert first.result().json()["usage"]["prompt_tokens"] == 3000
    assert together == alone


def test_an_interrupt_ends_it_well(server):
    server.stop()
    assert any("shut" in line.lower() or "drain" in line.lower() for line in server.lines), server.lines[-5:]
