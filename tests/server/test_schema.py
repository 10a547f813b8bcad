"""Every route with bodies that its published schema allows, and with bodies that it does not: never a failure, never a hang."""

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.process import EchoProcess, metric

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 50  # a route, and as many with bodies that are wrong
# Those with bodies, and those without.
ASKED = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize",
    "/detokenize", "/abort_requests",
]  # fmt: skip
PLAIN = [
    *(("POST", path) for path in ("/ping", "/reset_prefix_cache", "/flush_cache")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{name}", "/health", "/ping", "/ready", "/version", "/load")),
    *(("GET", path) for path in ("/metrics", "/server_info", "/flush_cache")),
    ("HEAD", "/health"),
]
CASES = [
    *(("POST", path, mode, EXAMPLES) for path in ASKED for mode in GenerationMode),
    *((method, path, GenerationMode.POSITIVE, EXAMPLES) for method, path in PLAIN),
]


@pytest.fixture(scope="module")
def server():
    with EchoProcess("--max-model-len", "256") as running:
        yield running
        with running.client() as client:
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "still here", "max_tokens": 20}).json()
            assert answer["choices"][0]["text"] == "still here"
            assert metric(client, "vllm:num_requests_running") == metric(client, "vllm:num_requests_waiting") == 0
        assert "Traceback" not in "".join(running.stderr)


@pytest.fixture(scope="module")
def api_schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_route_is_known(api_schema):
    found = {(result.ok().method.upper(), result.ok().path) for result in api_schema.get_all_operations()}
    # A profile is that of JAX, which takes its time to start; `test_tiny.py` takes one.
    profile = {("POST", "/start_profile"), ("POST", "/stop_profile")}
    assert found == {(method, path) for method, path, _, _ in CASES} | profile


@pytest.mark.parametrize(("method", "path", "mode", "examples"), CASES)
def test_routes_keep_their_promises(api_schema, method, path, mode, examples):
    operation = api_schema[path][method]

    @hypothesis.settings(max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck), deadline=None)
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        case.call_and_validate(checks=CHECKS, timeout=5)

    run()
