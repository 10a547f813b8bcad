"""Prefix caching and drafts over HTTP: what is reported, who shares with whom, and forgetting it all."""

import json
import threading

import httpx
import pytest

from tests.server.process import ServerProcess, events, metric, wait_for

PAGE = 16
COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "cached": "vllm:prompt_tokens_cached_total",
    "last": "dcpjax:prefix_cache_lost_last_total",
    "rounding": "dcpjax:prefix_cache_lost_rounding_total",
    "shareable": "dcpjax:prefix_cache_shareable_total",
}


def counters(client) -> dict[str, float]:
    return {key: metric(client, name) for key, name in COUNTERS.items()}


def grown(client, before) -> dict[str, float]:
    return {key: value - before[key] for key, value in counters(client).items()}


def ask(client, prompt, **more) -> int:
    """Cached tokens as reported."""
    body = {"prompt": prompt, "max_tokens": 4, **more}
    return client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def ids(start: int, count: int) -> list[int]:
    return [100 + (start + 7 * i) % 150 for i in range(count)]


def test_br_16_what_is_reported_is_what_was_taken_over(client):
    """Twice the same 40 tokens: two whole pages of 16 hit, with drafts as without (see below)."""
    prompt, before = ids(1, 40), counters(client)
    assert [ask(client, prompt), ask(client, prompt)] == [0, 2 * PAGE]
    want = {"queries": 80, "hits": 32, "cached": 32, "last": 0, "rounding": 0, "shareable": 32}
    assert grown(client, before) == want


def test_losses_are_counted_apart(client):
    prompt = ids(2, 48)
    ask(client, prompt)
    before = counters(client)
    assert ask(client, prompt) == 47, "a whole prompt in the cache: its last token is computed all the same"
    assert ask(client, prompt[:20] + [99] * 10) == PAGE, "4 more tokens are the same, but no whole page"
    want = {"queries": 78, "hits": 63, "cached": 63, "last": 1, "rounding": 4, "shareable": 68}
    assert grown(client, before) == want


def test_salts_do_not_share(client):
    prompt, salts = ids(3, 40), ["a", "a", "b", None, "b"]
    assert [ask(client, prompt, **({"cache_salt": s} if s else {})) for s in salts] == [0, 32, 0, 0, 32]


def test_no_store_reads_but_leaves_nothing(client):
    prompt = ids(4, 40)
    assert [ask(client, prompt, no_store=wish) for wish in (True, True, False, True)] == [0, 0, 0, 32]


def test_chats_report_it_too_streamed_or_not(client):
    body = {"messages": [{"role": "user", "content": "Do you remember this long question of mine?"}], "max_tokens": 5}
    usages = [client.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2)]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    usages.append(events(client.post("/v1/chat/completions", json={**body, **options}).text)[-1]["usage"])
    salted = {**body, "cache_salt": "mine", "no_store": True}
    usages += [client.post("/v1/chat/completions", json=salted).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    whole = (usages[0]["prompt_tokens"] - 1) // PAGE * PAGE
    assert whole > 0 and cached == [0, whole, whole, 0, 0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("field", "value"), [("cache_salt", ""), ("cache_salt", 5), ("no_store", "yes")])
def test_wishes_that_are_none(client, path, field, value):
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], field: value}
    response = client.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == field


def details(client, **more) -> dict[str, int]:
    body = {"prompt": "Tell me", "max_tokens": 7, "ignore_eos": True, **more}
    return client.post("/v1/completions", json=body).json()["usage"]["completion_tokens_details"]


def spec(client) -> list[float]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    values = [metric(client, f"vllm:spec_decode_{name}_total") for name in names]
    places = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return values + [metric(client, places, position=str(place)) for place in range(2)]


def test_drafts_are_counted_by_request_and_in_all(client):
    """The first token comes from the prompt, 6 more from two decode rows of 1 + 2 tokens."""
    before = spec(client)
    found = details(client)
    assert (found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]) == (4, 0)
    assert [now - old for now, old in zip(spec(client), before, strict=True)] == [2, 4, 4, 2, 2]
    assert details(client, n=3)["accepted_prediction_tokens"] == 12
    cut = details(client, max_tokens=5)
    assert (cut["accepted_prediction_tokens"], cut["rejected_prediction_tokens"]) == (2, 0), (
        "what is past the limit is not verified"
    )


def test_rejected_drafts_and_a_pin():
    flags = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2, "pin": 2})]
    with ServerProcess(*flags, fake={"num_drafts": 2, "num_accepted": 1}) as server, server.client() as client:
        found = details(client)
        assert (found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]) == (3, 2), (
            "the last row has room for one"
        )
        assert spec(client) == [3, 5, 3, 3, 0]
        assert client.post("/v1/completions", json={"prompt": "x"}).json()["system_fingerprint"].endswith("-pinned")
        assert any("forced to 2" in line for line in server.stderr)
        assert ask(client, ids(1, 40)) == 0 and ask(client, ids(1, 40)) == 32


def test_without_cache_and_drafts():
    with ServerProcess(fake={"prefix_caching": False}) as server, server.client() as client:
        assert [ask(client, ids(1, 40)) for _ in range(2)] == [0, 0]
        assert set(counters(client).values()) == {0}
        assert "spec_decode" not in client.get("/metrics").text
        assert set(details(client).values()) == {0}
        assert client.post("/reset_prefix_cache").status_code == 200


def test_reset_forgets():
    with ServerProcess("--api-key", "k", fake={"delay": 0.02}) as server, server.client() as client:
        assert client.post("/reset_prefix_cache").status_code == 401
        client.headers["authorization"] = "Bearer k"
        assert [ask(client, ids(1, 40)) for _ in range(2)] == [0, 32]
        response = client.post("/reset_prefix_cache")
        assert response.status_code == 200 and response.content == b""
        assert ask(client, ids(1, 40)) == 0 and ask(client, ids(1, 40)) == 32
        response = client.post("/reset_prefix_cache?reset_running_requests=maybe")
        assert response.status_code == 400 and response.json()["error"]["param"] == "reset_running_requests"
        check_reset_while_running(server, client)


def check_reset_while_running(server, client) -> None:
    """They go on, and what they have is for nobody else; or they start again. The text is the same."""
    body = {"prompt": "SLOW" + "x" * 40, "max_tokens": 60}
    want = client.post("/v1/completions", json=body).json()["choices"]
    answers = []

    def run():
        with httpx.Client(base_url=server.url, timeout=20, headers=client.headers) as other:
            answers.append(other.post("/v1/completions", json=body).json()["choices"])

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: metric(client, "vllm:num_requests_running") == 1)
    response = client.post("/flush_cache")
    assert response.status_code == 200 and response.content == b""
    usage = client.post("/v1/completions", json={**body, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "the one that runs has these tokens, from before"
    assert ask(client, ids(1, 40)) == 0 and ask(client, ids(1, 40)) == 32
    assert metric(client, "vllm:num_requests_running") == 1, "or what follows tests nothing"
    assert client.get("/flush_cache?reset_running_requests=true").status_code == 200
    thread.join(20)
    assert answers == [want]
    assert metric(client, "vllm:num_preemptions_total") == 1
    assert ask(client, ids(1, 40)) == 0
