"""From start to exit: readiness, signals, draining, disconnects, the engine's death; each in a process of its own."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.server.process import ROOT, ServerProcess, children, events, metric, wait_for

BODY = {"prompt": "SLOW", "max_tokens": 60}


class Background:
    """One request in a thread; `response` once it is complete."""

    def __init__(self, server: ServerProcess, **body):
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(server.url, {**BODY, **body}), daemon=True)
        self._thread.start()

    def _run(self, url: str, body: dict) -> None:
        with httpx.Client(base_url=url, timeout=20) as client:
            self.response = client.post("/v1/completions", json=body)

    def join(self) -> httpx.Response:
        self._thread.join(15)
        assert self.response is not None
        return self.response


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def refused(response: httpx.Response) -> bool:
    return response.status_code == 503 and response.json()["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0(number):
    with ServerProcess(fake={"delay": 0.02}) as server, server.client() as client:
        running = [Background(server), Background(server, stream=True)]
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 2)
        server.signal(number)
        wait_for(lambda: client.get("/health").status_code == 503)
        response = client.post("/v1/completions", json=BODY)
        assert refused(response) and int(response.headers["retry-after"]) > 0
        assert client.get("/v1/models").status_code == 200
        whole, stream = (request.join() for request in running)
        assert whole.status_code == 200 and whole.json()["choices"][0]["finish_reason"] == "length"
        assert events(stream.text)[-1]["choices"][0]["finish_reason"] == "length"
        client.close()
        assert server.wait() == 0
        assert len(server.stdout) == 1 and server.stdout[0].startswith("Ready: "), "the ready line, once"
        assert "Traceback" not in "".join(server.stderr)


def test_what_is_not_done_when_the_time_is_up_is_aborted_with_a_last_chunk():
    with (
        ServerProcess("--shutdown-timeout", "0.2", fake={"delay": 0.05}) as server,
        server.client() as client,
        Leaver(server.url, BODY, missing=5) as half,
    ):
        running = [Background(server, stream=True), Background(server)]
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 2)
        server.signal()
        assert events(running[0].join().text)[-1]["choices"][0]["finish_reason"] == "abort"
        assert running[1].join().json()["choices"][0]["finish_reason"] == "abort"
        head, _, error = half.makefile("rb").read().partition(b"\r\n\r\n")
        assert b" 503 " in head and json.loads(error)["error"]["code"] == 503, "whose body never came"
        assert server.wait() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(number, code):
    with (
        ServerProcess(fake={"delay": 0.1}) as server,
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        lines = response.iter_lines()  # kept: without it the client closes the connection
        assert next(lines)
        server.signal()
        wait_for(lambda: "draining" in "".join(server.stderr))
        start = time.monotonic()
        server.signal(number)
        assert server.wait() == code and time.monotonic() - start < 2


def test_not_ready_while_loading_and_a_signal_ends_that():
    port = free_port()
    with ServerProcess(fake={"load_seconds": 30}, wait=False, port=port) as server, server.client() as client:

        def answers() -> bool:
            try:
                return client.get("/health").status_code == 503
            except httpx.ConnectError:
                return False

        wait_for(answers, 15)
        assert refused(client.post("/v1/completions", json=BODY)) and refused(client.get("/v1/models"))
        assert refused(client.get("/metrics")) and client.get("/version").status_code == 200
        server.signal()
        assert server.wait() == 0 and not server.stdout


def test_a_model_that_cannot_be_loaded_is_one_line_and_not_0():
    with ServerProcess(fake={"broken": True}, wait=False) as server:
        assert server.wait() == 2
        assert server.stderr == ["dcpjax.serve: error: this model is broken; take another\n"] and not server.stdout


def test_an_address_that_is_taken_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess(wait=False, port=port) as server:
            assert server.wait() == 2
            assert len(server.stderr) == 1 and f"cannot listen on 127.0.0.1:{port}" in server.stderr[0]


def test_a_client_that_goes_away_stops_its_requests():
    with ServerProcess(fake={"delay": 0.03}) as server, server.client() as client:
        for stream in (True, False):
            aborted = metric(client, "vllm:request_success_total", finished_reason="abort")
            body = {**BODY, "max_tokens": 200, "prompt": ["SLOW"] * 6, "n": 2, "stream": stream}  # 8 run, 4 wait
            with Leaver(server.url, body):
                wait_for(lambda: metric(client, "vllm:num_requests_running") == 8)
                assert metric(client, "vllm:num_requests_waiting") == 4
            wait_for(lambda: metric(client, "vllm:num_requests_running") == 0, 1)
            assert metric(client, "vllm:num_requests_waiting") == 0
            wait_for(lambda: metric(client, "vllm:kv_cache_usage_perc") == 0)
            assert metric(client, "vllm:request_success_total", finished_reason="abort") == aborted + 12
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert "Traceback" not in "".join(server.stderr)


class Leaver:
    """Sends a request, but for bytes that are `missing`, and closes the connection, without a word, at the end of the block."""

    def __init__(self, url: str, body: dict, missing: int = 0):
        url, content = httpx.URL(url), json.dumps(body)
        head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self._socket = socket.create_connection((url.host, url.port))
        self._socket.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{content}".encode()[: -missing or None])

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_the_engines_death_fails_what_is_pending_and_ends_the_process():
    with ServerProcess(fake={"delay": 0.02}) as server, server.client() as client:
        running = [Background(server), Background(server, stream=True)]
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 2)
        response = client.post("/v1/completions", json={"prompt": "DIE"})
        whole, stream = (request.join() for request in running)
        for error in (response.json()["error"], whole.json()["error"], events(stream.text)[-1]["error"]):
            assert error["code"] == 500 and error["type"] == "InternalServerError"
            assert "secret" not in error["message"] and "device" not in error["message"]
        assert response.status_code == whole.status_code == 500 and stream.status_code == 200
        assert server.wait(10) == 1
        assert "the device is gone" in "".join(server.stderr), "the log says why"


def test_the_engines_process_may_be_killed():
    with ServerProcess(fake={"delay": 0.02}) as server, server.client() as client:
        running = [Background(server), Background(server, stream=True)]
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 2)
        _, engine = server.processes()
        os.kill(engine, signal.SIGKILL)
        whole, stream = (request.join() for request in running)
        assert (
            whole.status_code == 500 and whole.json()["error"]["message"] == events(stream.text)[-1]["error"]["message"]
        )
        assert server.wait() == 1 and "ended by signal 9 (SIGKILL)" in "".join(server.stderr)


def test_a_start_script_may_have_closed_and_ignored_what_it_likes():
    """Its standard streams, and the ends of its children, which `exec` hands on."""
    port = free_port()
    command = f"trap '' CHLD; exec {sys.executable} -m tests.server.fake_serve --port {port} <&- >&- 2>&-"
    server = subprocess.Popen(["bash", "-c", command], cwd=ROOT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            wait_for(lambda: ready(client))
            (engine,) = children(server.pid)
            os.kill(engine, signal.SIGKILL)
            assert server.wait(15) == 1
    finally:
        server.kill()
        server.wait()


def ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_bad_certificate_is_one_line(tmp_path):
    (tmp_path / "x.pem").write_text("none")
    flags = ["--ssl-certfile", str(tmp_path / "x.pem"), "--ssl-keyfile", str(tmp_path / "x.pem")]
    with ServerProcess(*flags, wait=False) as server:
        assert server.wait() == 2 and len(server.stderr) == 1 and "give a certificate in PEM" in server.stderr[0]


def test_nothing_is_left_of_either_process_when_the_other_is_killed():
    port = free_port()
    with ServerProcess(fake={"load_seconds": 30}, wait=False, port=port) as server:
        wait_for(lambda: len(server.processes()) == 2)
        os.kill(server.processes()[1], signal.SIGKILL)
        assert server.wait() == 1 and "while it loaded the model" in "".join(server.stderr)
    with ServerProcess(fake={"load_seconds": 30}, wait=False, port=port) as server:
        wait_for(lambda: len(server.processes()) == 2)
        engine = pathlib.Path(f"/proc/{server.processes()[1]}/cmdline")
        server.signal(signal.SIGKILL)
        wait_for(lambda: not (engine.exists() and engine.read_bytes()))


def test_keys_limits_and_defaults():
    flags = ["--max-request-body-bytes", "1000", "--override-generation-config", '{"max_new_tokens": 3}']
    env = {**os.environ, "DCPJAX_API_KEY": "secret"}
    with ServerProcess(*flags, env=env) as server, server.client() as client:
        check_keys(client)
        client.headers["authorization"] = "Bearer secret"
        check_large_bodies(client)
        for wish, tokens in (({}, 3), ({"max_tokens": 2}, 2)):
            response = client.post("/v1/completions", json={"prompt": "x", "ignore_eos": True, **wish})
            assert response.json()["usage"]["completion_tokens"] == tokens
        # The client's connection is still open, but idle: it does not hold the exit up.
        start = time.monotonic()
        server.signal()
        assert server.wait() == 0 and time.monotonic() - start < 3


def check_keys(client: httpx.Client) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        response = client.get("/v1/models", headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "AuthenticationError"
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions"):
        assert client.post(path, json={}).status_code == 401
    for path in ("/health", "/metrics", "/version"):
        assert client.get(path).status_code == 200
    for headers in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        assert client.get("/v1/models", headers=headers).status_code == 200


def check_large_bodies(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": "x" * 1000})
    assert response.status_code == 413 and response.json()["error"]["type"] == "RequestTooLargeError"

    def chunks():  # no length is announced
        for _ in range(20):
            yield b" " * 100

    response = client.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_a_model_without_a_tokenizer_takes_token_ids():
    with ServerProcess(fake={"no_tokenizer": True}) as server, server.client() as client:
        body = {"prompt": [5, 6], "max_tokens": 4, "return_token_ids": True, "logprobs": 1}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == "" and len(choice["token_ids"]) == 4 and len(choice["logprobs"]["tokens"]) == 4
        for path, body in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/completions", {"prompt": [5], "stop": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/tokenize", {"prompt": "x"}),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 400 and "no tokenizer" in response.json()["error"]["message"]
