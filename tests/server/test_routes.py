"""The small routes: models, health, version, tokenize, metrics, schema."""

import prometheus_client.parser

from dcpjax import __version__
from tests.server.fake_llm import make_tokenizer
from tests.server.process import metric

TOKENIZER = make_tokenizer()


def test_models(client):
    answer = client.get("/v1/models").json()
    assert answer["object"] == "list" and [card["id"] for card in answer["data"]] == ["fake", "alias"]
    card = client.get("/v1/models/alias").json()
    assert card == answer["data"][1] and card["root"] == "fake" and card["parent"] is None
    assert card["max_model_len"] == 256 and card["owned_by"] == "dcpjax" and card["object"] == "model"


def test_health_and_version(client):
    for method in ("GET", "HEAD"):
        response = client.request(method, "/health")
        assert response.status_code == 200 and response.content == b""
    assert client.get("/version").json() == {"version": __version__}


def test_tokenize_and_back(client):
    text = "Hi 🙂 <|user|>naïve"
    answer = client.post("/tokenize", json={"prompt": text}).json()
    assert answer == {
        "count": len(TOKENIZER.encode(text)),
        "max_model_len": 256,
        "tokens": TOKENIZER.encode(text),
        "token_strs": None,
    }
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    for body, param in (({}, "prompt"), ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt")):
        response = client.post("/tokenize", json=body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    response = client.post("/detokenize", json={"tokens": [TOKENIZER.vocab_size]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "tokens"


def test_metrics_count_what_happened(client):
    names = {
        "prompt": "vllm:prompt_tokens_total",
        "generated": "vllm:generation_tokens_total",
        "first": "vllm:time_to_first_token_seconds_count",
        "whole": "vllm:e2e_request_latency_seconds_count",
        "between": "vllm:inter_token_latency_seconds_count",
        "lengths": "vllm:request_generation_tokens_sum",
    }
    before = {key: metric(client, name) for key, name in names.items()}
    stopped = metric(client, "vllm:request_success_total", finished_reason="stop")
    usage = client.post("/v1/completions", json={"prompt": "Tell me", "n": 2, "max_tokens": 100}).json()["usage"]
    after = {key: metric(client, name) - before[key] for key, name in names.items()}
    assert after["prompt"] == 2 * usage["prompt_tokens"]
    assert after["generated"] == after["lengths"] == usage["completion_tokens"]
    assert after["first"] == after["whole"] == 2 and after["between"] >= 2
    assert metric(client, "vllm:request_success_total", finished_reason="stop") == stopped + 2
    assert metric(client, "vllm:num_requests_running") == metric(client, "vllm:num_requests_waiting") == 0
    assert metric(client, "vllm:kv_cache_usage_perc") == 0


def test_metrics_of_the_dashboards_are_all_there(client):
    client.post("/v1/completions", json={"prompt": "Tell me", "n": 2, "max_tokens": 7})
    body = {"prompt": list(range(100, 140)), "max_tokens": 2}
    before = metric(client, "vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    for _ in range(2):
        client.post("/v1/completions", json=body)
    assert metric(client, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == before + 32
    total = metric(client, "vllm:prompt_tokens_total")
    assert metric(client, "vllm:prompt_tokens_by_source_total") == total
    waiting = metric(client, "vllm:num_requests_waiting")
    assert metric(client, "vllm:num_requests_waiting_by_reason") == waiting == 0
    assert metric(client, "vllm:cache_config_info", block_size="16", num_gpu_blocks="255") == 1
    for name in (
        "request_params_max_tokens", "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens",
        "request_inference_time_seconds", "request_queue_time_seconds", "request_params_n", "iteration_tokens_total",
    ):  # fmt: skip
        assert metric(client, f"vllm:{name}_count") > 0
    assert metric(client, "dcpjax:compile_seconds_total") == 1.5 and metric(client, "dcpjax:compiled_shapes") == 3
    assert metric(client, "dcpjax:device_memory_bytes", device="fake:0") == 2**40
    assert metric(client, "dcpjax:kv_tokens_per_rank", rank="0") == 0
    for phase in ("prefill", "decode"):
        assert metric(client, "dcpjax:step_seconds_count", phase=phase) > 0


def test_metrics_are_text_that_prometheus_reads(client):
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [
        sample
        for family in prometheus_client.parser.text_string_to_metric_families(response.text)
        for sample in family.samples
    ]
    assert all(sample.labels["model_name"] == "fake" and sample.labels["engine"] == "0" for sample in samples)
    reasons = {s.labels["finished_reason"] for s in samples if s.name == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}


def test_the_schema_has_the_bodies(client):
    paths = client.get("/openapi.json").json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in body["required"] and "temperature" in body["properties"]
