"""The load client against an echo server: what it reports is what was asked and what the server says of itself."""

import json
import sys

import pytest

from dcpjax.bench import __main__ as command
from dcpjax.bench.serve import percentiles
from tests.server.process import EchoProcess

SPEC = '{"method": "mtp", "num_speculative_tokens": 2}'


@pytest.fixture(scope="module")
def server():
    with EchoProcess("--block-size", "16", "--speculative-config", SPEC) as running:
        yield running


def bench(monkeypatch, tmp_path, server, *flags: str) -> list[dict]:
    file = tmp_path / "figures.json"
    line = ["bench", "serve", "--url", server.url, "--json", str(file), *flags]
    monkeypatch.setattr(sys, "argv", line)
    command.main()
    return json.loads(file.read_text())["rows"]


def test_a_sweep_with_a_shared_prefix(monkeypatch, tmp_path, server, capsys):
    flags = (
        "--concurrency",
        "1,3",
        "--requests",
        "6",
        "--prompt-tokens",
        "64",
        "--output-tokens",
        "7",
        "--shared",
        "0.5",
    )
    rows = bench(monkeypatch, tmp_path, server, *flags)
    assert [row["concurrency"] for row in rows] == [1, 3] and len(capsys.readouterr().out.splitlines()) == 2
    for row in rows:
        assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (6, 6 * 64, 6 * 7)
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["e2e_ms"]["p99"]
        assert row["cached_share"] == row["cached_share_by_metrics"]
        assert row["acceptance_length"] == 3 and row["acceptance_by_place"] == [1, 1]
    # Alone, all but the first take over half of their prompt: two pages.
    assert rows[0]["cached_share"] == pytest.approx(5 * 32 / (6 * 64))


def test_a_trace_at_its_own_times(monkeypatch, tmp_path, server):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 400 * i, "input_length": 1024, "output_length": 32, "hash_ids": [7, 8 + i]} for i in range(4)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--trace", str(trace), "--speed", "2", "--divide", "16", "--requests", "3")
    (row,) = bench(monkeypatch, tmp_path, server, *flags)
    assert row["concurrency"] is None and row["requests"] == 3 and row["seconds"] >= 0.4
    assert row["prompt_tokens"] == 3 * 64 and row["output_tokens"] == 3 * 2
    assert row["cached_share"] == pytest.approx(2 * 32 / (3 * 64)), "the block that all share"


def test_percentiles():
    assert percentiles([]) is None
    figures = percentiles(range(1, 101))
    assert (figures["mean"], figures["p50"], figures["p90"], figures["p99"]) == (50.5, 51, 91, 100)


def test_the_server_alone(monkeypatch, tmp_path, capsys):
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["bench", "serve", "--alone", "--quick", "--json", str(file)])
    command.main()
    figures = json.loads(file.read_text())
    assert figures["requests_per_second"].keys() == {"echo", "constant"} and figures["requests_ratio"] > 0
    assert figures["chunks_per_second"].keys() == {"stream", "bare"} and figures["chunks_ratio"] > 0
    assert {"ms_a_request", "us_a_prompt_token", "us_a_streamed_token"} < figures.keys() and figures["gap_ms"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 4
