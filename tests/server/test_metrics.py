"""Histograms: what is counted once a request, and the one that is our own."""

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from dcpjax.host.request import Request, SamplingParams, Times
from dcpjax.server.engine_client import EngineClient
from dcpjax.server.metrics import Metrics
from tests.server.test_watch import NOTHING


def samples(metrics: Metrics) -> dict[tuple, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, s.labels.get("le")): s.value for family in families for s in family.samples}


def request(params: SamplingParams, choice: int, tokens: int, reason: str = "stop") -> Request:
    times = Times(arrival=1.0, first_scheduled=1.0, first_token=2.0, finished=3.0)
    made = Request(f"{choice}", [1, 2], params, 100, 0, choice, output=[5] * tokens, metrics=times)
    made.finish_reason = reason
    return made


def test_the_longest_choice_is_counted_once():
    metrics, name = Metrics("m", 4096, lambda: NOTHING), "vllm:request_max_num_generation_tokens"
    three = SamplingParams(n=3)
    for choice, tokens in enumerate((3, 40, 7)):
        metrics.finished(request(three, choice, tokens))
    metrics.finished(request(SamplingParams(), 0, 9, "abort"))
    found = samples(metrics)
    assert found[f"{name}_count", None] == 1 and found[f"{name}_sum", None] == 40
    assert found["vllm:request_generation_tokens_count", None] == 3


def test_waits_between_tokens():
    metrics, name = Metrics("m", 4096, lambda: NOTHING), "vllm:inter_token_latency_seconds"
    made = request(SamplingParams(), 0, 4)
    for seconds in (0.01, 0.011, 0.3, 100.0):
        metrics.tokens(made, 1, seconds)
    found = samples(metrics)
    places = [value for (key, le), value in found.items() if key == f"{name}_bucket"]
    assert (
        found[f"{name}_bucket", "0.01"] == 1 and found[f"{name}_bucket", "0.025"] == 2
    )  # a bound belongs to its bucket
    assert places == sorted(places) and found[f"{name}_bucket", "+Inf"] == found[f"{name}_count", None] == 4
    assert abs(found[f"{name}_sum", None] - 100.321) < 1e-9


def test_answers_are_aborted_by_the_ids_that_clients_saw():
    tickets = [SimpleNamespace(name=name) for name in ("a", "b", "c", "d", "e")]
    cut: list[str] = []
    client = SimpleNamespace(_tickets=tickets, cut_ticket=lambda ticket: cut.append(ticket.name))
    EngineClient.cut(client, ["chatcmpl-a", "cmpl-b", "msg_c", "resp_d", "other"])
    assert cut == ["a", "b", "c", "d"]
