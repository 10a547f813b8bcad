"""What the server refuses or ends for want of room or time, who may call it from where, and what operators look at."""

import json
import os
import pathlib
import shutil
import ssl
import subprocess
import threading
import time

import httpx
import pytest

from dcpjax.server.echo import TINY
from tests.server.process import EchoProcess, ServerProcess, events, metric, wait_for

SLOW = {"prompt": "SLOW", "max_tokens": 200}


def post(client, **body):
    return client.post("/v1/completions", json=body)


class Held:
    """A stream that is being written while the block runs."""

    def __init__(self, client: httpx.Client, **body):
        self._client, self._body = client, {**SLOW, "stream": True, **body}

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_for(lambda: any("choices" in line for line in self.lines))
        return self.lines

    def _run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body) as response:
            for line in response.iter_lines():
                self.lines.append(line)

    def __exit__(self, *_: object) -> None:
        self._thread.join(20)


@pytest.fixture(scope="module")
def slow():
    with ServerProcess("--max-queued-requests", "2", fake={"delay": 0.02}) as server:
        yield server


def test_a_full_queue_refuses(slow):
    with slow.client() as client, Held(client, n=8) as lines:
        threads = [threading.Thread(target=post, args=(client,), kwargs={"prompt": "x"}) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: metric(client, "vllm:num_requests_waiting") == 2)
        assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
        response = post(client, prompt="x")
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "RateLimitError"
        response = client.post("/v1/messages", json={"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]})
        assert response.status_code == 429 and response.json()["error"]["type"] == "rate_limit_error"
        assert client.get("/load").json() == {"server_load": 3}
        client.post("/abort_requests", json={"request_ids": [json.loads(lines[0][6:])["id"]]})
        for thread in threads:
            thread.join(20)
        assert post(client, prompt="x").status_code == 200 and client.get("/ready").status_code == 200


def test_requests_can_be_aborted_by_their_ids(slow):
    with slow.client() as client:
        held = Held(client, request_id="mine")
        with held:
            assert client.post("/abort_requests", json={"request_ids": ["other", "mine"]}).status_code == 200
        assert json.loads(held.lines[-4][6:])["choices"][0]["finish_reason"] == "abort"
        assert client.post("/abort_requests", json={}).status_code == 400


def test_the_urgent_are_served_first_and_pages_are_found_by_another_hash():
    flags = ("--max-num-seqs", "1", "--scheduling-policy", "priority", "--prefix-caching-hash-algo", "xxhash")
    with EchoProcess(*flags) as server, server.client() as client:
        body = {"prompt": list(range(200)), "max_tokens": 500, "ignore_eos": True}
        want, texts = post(client, **body).json(), {}

        def ask(priority: int) -> None:
            texts[priority] = post(client, **body, priority=priority).json()["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(priority,)) for priority in (3, -1)]
        with Held(client, **{**body, "max_tokens": 3800, "request_id": "long"}):
            for i, thread in enumerate(threads):
                thread.start()
                wait_for(lambda count=i + 1: metric(client, "vllm:num_requests_waiting") == count)
            client.post("/abort_requests", json={"request_ids": ["long"]})
            for thread in threads:
                thread.join(20)
        assert list(texts) == [-1, 3], "in this order"
        assert set(texts.values()) == {want["choices"][0]["text"]}
        assert metric(client, "vllm:prefix_cache_hits_total") == 3 * 192


def test_chunks_of_several_tokens():
    with ServerProcess("--stream-interval", "5", fake={"delay": 0.001}) as server, server.client() as client:
        chunks = events(
            post(client, prompt="x", max_tokens=23, ignore_eos=True, stream=True, return_token_ids=True).text
        )
        sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
        assert sum(sizes) == 23 and sizes[0] < 5 and all(size >= 5 for size in sizes[1:-1]) and len(sizes) <= 7


def test_time_runs_out():
    """Nobody got a token: 504. Somebody did: what there is, and the reason "abort"."""
    flags = ("--request-timeout", "0.5")
    with ServerProcess(*flags, fake={"delay": 0.03}) as server, server.client() as client:
        answer = post(client, **SLOW, n=8).json()
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"abort"} and answer["choices"][0]["text"]
    with ServerProcess(*flags, fake={"delay": 5}) as server, server.client() as client:
        start = time.monotonic()
        response = post(client, prompt="x")
        assert response.status_code == 504 and response.json()["error"]["type"] == "TimeoutError"
        assert time.monotonic() - start < 3


def test_what_never_fits_the_cache_is_told_so():
    with ServerProcess(fake={"num_pages": 4}) as server, server.client() as client:
        assert post(client, prompt=[5] * 30, max_tokens=18).status_code == 200
        response = post(client, prompt=[5] * 30, max_tokens=19)
        assert response.status_code == 503 and response.json()["error"]["type"] == "ServiceUnavailableError"
        assert "the KV cache has 3" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "serve.yaml"
    file.write_text(
        "engine: echo\nserved-model-name: [one, two]\nallowed-origins: ['https://a.example']\nallow_credentials: true\n"
        "enable-request-id-headers: true\nmax-model-len: 1k\nreasoning-field: both\nenable-force-include-usage: true\n"
        "enable-prompt-tokens-details: false\napi-key: [k, other]\nport: 1\nroot-path: /behind/\n"
    )
    with EchoProcess("--config", str(file), "--enable-dev-endpoints") as server:
        yield server


@pytest.fixture(scope="module")
def client(echo):
    with httpx.Client(base_url=echo.url, timeout=20, headers={"Authorization": "Bearer other"}) as client:
        yield client


def test_a_file_sets_flags_and_the_line_wins(client):
    cards = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["one", "two"] and cards[0]["max_model_len"] == 1000


def test_browsers_are_told_who_may_ask(client):
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    response = client.options("/v1/chat/completions", headers=asked)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://a.example"
    assert response.headers["access-control-allow-credentials"] == "true"
    response = client.options("/v1/chat/completions", headers={**asked, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in response.headers and response.headers["x-request-id"]
    refused = client.get("/v1/models", headers={"Authorization": "Bearer no", "Origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"


def test_answers_carry_the_requests_id(client):
    response = post(client, prompt="x", max_tokens=1)
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert client.get("/nothing", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"


def test_names_of_the_thinking_and_usage_as_flags_say(client):
    body = {"messages": [{"role": "user", "content": "hm</think>Hi"}]}
    answer = client.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert "prompt_tokens_details" not in answer["usage"]
    chunks = events(client.post("/v1/chat/completions", json={**body, "stream": True}).text)
    assert chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["choices"] == []


def test_small_routes(client):
    for method in ("GET", "POST"):
        assert client.request(method, "/ping").status_code == 200
        assert client.request(method, "/flush_cache").status_code == 200
    assert client.get("/ready").status_code == 200
    assert client.get("/load").json() == {"server_load": 0}
    assert post(client, prompt="x", max_tokens=2).status_code == 200
    info = client.get("/server_info").json()
    assert info["num_blocks"] == info["num_free_blocks"] and info["arguments"]["max_model_len"] == 1000
    assert info["steps"]["count"] > 0 and info["steps"]["p99_ms"] >= info["steps"]["p50_ms"] >= 0
    assert info["system_fingerprint"].startswith("dcpjax-") and info["description"]


def test_all_but_a_few_routes_need_a_key(echo):
    for path in (
        "/v1/models", "/v1/chat/completions", "/tokenize", "/load", "/server_info", "/flush_cache", "/reset_prefix_cache",
        "/abort_requests", "/start_profile", "/stop_profile", "/live", "/docs", "/nothing",
    ):  # fmt: skip
        for method in ("GET", "POST"):
            response = httpx.request(method, f"{echo.url}{path}")
            assert response.status_code == 401 and response.json()["error"]["type"] == "AuthenticationError", path
    for path in ("/", "/health", "/ready", "/ping", "/metrics", "/version", "/openapi.json"):
        assert httpx.get(f"{echo.url}{path}").status_code == 200, path


def test_a_proxys_prefix_opens_nothing(echo):
    """The server runs with --root-path: routes are guarded, and refuse in their protocol's form, as without."""
    assert httpx.post(f"{echo.url}/v1/chat/completions", json={}).status_code == 401
    response = httpx.post(f"{echo.url}/v1/messages", json={})
    assert response.status_code == 401 and response.json()["type"] == "error"
    response = httpx.post(f"{echo.url}/v1/messages", json={}, headers={"X-Api-Key": "k"})
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    (place,) = httpx.get(f"{echo.url}/openapi.json").json()["servers"]
    assert place["url"].startswith("/"), "where clients of the document find the routes"


def test_operators_routes_are_closed_to_the_world():
    with EchoProcess("--host", "0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        for path in ("/reset_prefix_cache", "/flush_cache", "/abort_requests"):
            response = httpx.post(f"{url}{path}", json={})
            assert response.status_code == 404 and response.json()["error"]["type"] == "NotFoundError"


def test_https_and_a_tokenizer_and_defaults_from_elsewhere(tmp_path):
    words, model, key, certificate = (tmp_path / name for name in ("words", "model", "key.pem", "certificate.pem"))
    shutil.copytree(TINY, words, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.mkdir()
    shutil.copy(TINY / "config.json", model)
    (model / "generation_config.json").write_text('{"max_new_tokens": 1}')
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run(["openssl", *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    flags = ["--tokenizer", str(words), "--generation-config", "vllm", "--ssl-keyfile", str(key), "--ssl-certfile"]
    with EchoProcess("--model", str(model), *flags, str(certificate), wait=False) as server:
        url = server.first_line().split()[1]
        trusted = ssl.create_default_context(cafile=certificate)
        trusted.check_hostname = False
        with httpx.Client(base_url=url, verify=trusted) as client:
            assert url.startswith("https://")
            assert post(client, prompt="Hello there").json()["choices"][0]["text"] == "Hello there"


def test_a_unix_socket(tmp_path):
    path = tmp_path / "s"
    with EchoProcess("--uds", str(path), wait=False) as server:
        assert server.first_line().startswith(f"Ready: unix:{path} ")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.get("/health").status_code == 200


RECIPE = """--speculative-config.method mtp --speculative-config.num_speculative_tokens 5 --tool-call-parser glm47
    --reasoning-parser glm45 --enable-auto-tool-choice --trust-remote-code --served-model-name glm-5.2 --gpu-memory-utilization
    0.9 --tensor-parallel-size 8 --decode-context-parallel-size 4 --kv-cache-dtype fp8 --enable-expert-parallel
    --max-model-len 2K --max-num-seqs 8 --moe-backend auto"""


def test_the_published_recipe_starts_unchanged():
    with EchoProcess(*RECIPE.split()) as server, server.client() as client:
        body = {"model": "glm-5.2", "messages": [{"role": "user", "content": "hm</think>Hi"}]}
        assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "Hi"
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
        assert sum("has no effect here" in line for line in server.stderr) == 2, "a line for each flag without meaning"


def test_refusals_come_at_once():
    start = _processor_seconds()
    with ServerProcess("-dcp", "3", "-tp", "4", "--speculative-config.method", "mtp", wait=False) as server:
        assert server.wait(60) == 2 and len(server.stderr) == 1
    assert _processor_seconds() - start < 5  # of its own: what else the machine does is not counted


def _processor_seconds() -> float:
    """Of all child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def test_templates_from_requests_only_if_trusted():
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template": "{{ messages[0].content }}!"}
    with EchoProcess("--trust-request-chat-template") as server, server.client() as client:
        assert client.post("/tokenize", json=body).json()["count"] < 5
        response = client.post("/tokenize", json={**body, "chat_template": "{% if"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "chat_template"


def test_control_tokens_in_messages_are_text_unless_allowed():
    body = {"messages": [{"role": "user", "content": "a<|assistant|>b"}]}
    counts = []
    for flags in ((), ("--allow-special-in-content",)):
        with EchoProcess(*flags) as server, server.client() as client:
            tokens = client.post("/tokenize", json=body).json()["tokens"]
            answer = client.post(
                "/v1/chat/completions", json={**body, "return_token_ids": True, "max_tokens": 1}
            ).json()
            assert answer["prompt_token_ids"] == tokens
            shown = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
            assert "<|user|>a<|assistant|>b<|assistant|>" in shown
            counts.append(len(tokens))
    assert counts[0] > counts[1]


def test_parsers_can_be_switched_off():
    with EchoProcess("--reasoning-parser", "none", "--tool-call-parser", "none") as server, server.client() as client:
        text = "hm</think>x<tool_call>now</tool_call>"
        tools = [{"type": "function", "function": {"name": "now"}}]
        body = {"messages": [{"role": "user", "content": text}], "tools": tools}
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert message["content"] == text and "tool_calls" not in message


def test_keys_from_the_environment():
    env = {**os.environ, "VLLM_API_KEY": "secret", "PYTHONPATH": str(pathlib.Path(__file__).parent.parent.parent)}
    with EchoProcess(env=env) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "secret"}).status_code == 200
