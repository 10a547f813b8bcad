"""The command line: both spellings, dotted JSON, lengths, and refusals of one line before anything is loaded."""

import json

import pytest

from dcpjax import serve
from dcpjax.server.arguments import parse


def refusal(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as error:
        parse(argv)
    assert error.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("dcpjax.serve: error: ")
    return lines[0]


def test_defaults():
    settings = parse([])
    assert (settings.listen.host, settings.listen.port, settings.listen.shutdown_timeout) == ("127.0.0.1", 8000, 30)
    assert settings.llm["model"] is None and settings.llm["decode_context_parallel_size"] == 1
    assert settings.llm["tensor_parallel_size"] is None and settings.llm["speculative_config"] is None
    assert settings.llm["overlap"] and settings.llm["enable_prefix_caching"]
    assert settings.options.max_logprobs == 20 and settings.options.sampling_defaults is None
    assert not settings.warnings


def test_the_arguments_of_an_llm_are_its_own():
    import inspect

    from dcpjax.llm import LLM

    known = set(inspect.signature(LLM.__init__).parameters) - {"self"}
    assert set(parse([]).llm) <= known


def test_both_spellings_and_short_forms():
    dashes = parse(
        ["m", "-tp", "8", "-dcp=4", "--block-size", "128", "--cp-kv-cache-interleave-size=2", "--no-overlap"]
    )
    lines = ["--model=m", "--tensor_parallel_size", "8", "--decode_context_parallel_size", "4", "--block_size=128"]
    assert parse([*lines, "--cp_kv_cache_interleave_size", "2", "--no_overlap"]) == dashes
    assert dashes.llm["tensor_parallel_size"] == 8 and dashes.llm["cp_kv_cache_interleave_size"] == 2
    assert dashes.llm["overlap"] is False


def test_values_keep_their_underscores():
    assert parse(["--served_model_name=my_model"]).options.served_names == ("my_model",)
    assert parse(["--dcp_comm_backend", "a2a", "-dcp", "2"]).llm["dcp_comm_backend"] == "a2a"


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("64k", 64000), ("64K", 65536), ("1M", 1 << 20), ("1.5k", 1500), ("auto", None)],
)
def test_lengths(text, value):
    assert parse(["--max-model-len", text]).llm["max_model_len"] == value


def test_kernels_are_chosen_by_a_word_or_by_name(capsys):
    assert parse([]).llm["kernels"] == "auto"
    assert parse(["--kernels", "xla"]).llm["kernels"] == "xla"
    assert parse(["--kernels", '{"topk":"xla"}', "--kernels.invariant", "true"]).llm["kernels"] == {
        "topk": "xla", "invariant": True,
    }  # fmt: skip
    with pytest.raises(SystemExit):
        parse(["--kernels", "fast"])
    assert "'fast' is not valid JSON" in capsys.readouterr().err


def test_dotted_json_is_laid_over_the_whole():
    whole = parse(["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 5}'])
    dotted = ["--speculative-config.method", "mtp", "--speculative_config.num_speculative_tokens=5"]
    assert parse(dotted) == whole
    mixed = ["--speculative-config.num_speculative_tokens", "5", "--speculative-config"]
    assert parse([*mixed, '{"method": "mtp", "num_speculative_tokens": 1}']) == whole
    assert parse(["--hf-overrides.rope_parameters.rope_theta", "5.5", "--hf-overrides.x", "a b"]).llm[
        "hf_overrides"
    ] == {
        "rope_parameters": {"rope_theta": 5.5},
        "x": "a b",
    }


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--block-sizes", "3"], "did you mean --block-size?"),
        (["--tensor-paralel-size", "3"], "did you mean --tensor-parallel-size?"),
        (["-dcp", "3", "-tp", "4"], "--decode-context-parallel-size 3 must divide --tensor-parallel-size 4"),
        (["--dcp-comm-backend", "a2a"], "needs --decode-context-parallel-size above 1"),
        (["--dcp-comm-backend", "nccl"], "'a2a'"),
        (["-dcp", "4", "--block-size", "66"], "raise it to 68"),
        (["-dcp", "4", "--cp-kv-cache-interleave-size", "32"], "raise it to 128"),
        (["-dcp", "4", "--dcp-index-shards", "2"], "must be 1 or the dcp size 4"),
        (["--data-parallel-size", "2"], "use 1"),
        (["--num-gpu-blocks-override", "1"], "at least 2"),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "at least --max-num-seqs 9"),
        (
            ["--max-num-seqs=9", "--max-num-batched-tokens=35", "--speculative-config.num_speculative_tokens=3"],
            "at least --max-num-seqs 9 × (1 + 3 drafts)",
        ),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--max-model-len", "lots"], "not a length"),
        (["--speculative-config", "{"], "not valid JSON"),
        (["--speculative-config", "[1]"], "not a JSON object"),
        (["--speculative-config", '{"num_drafts": 1}'], "--speculative-config: unknown keys ['num_drafts']"),
        (["--speculative-config.method", "eagle"], "--speculative-config: method 'eagle' is not known; use 'mtp'"),
        (["--speculative-config.num_speculative_tokens", "17"], "must be a whole number, 0 to 16, got 17"),
        (["--speculative-config.num_speculative_tokens", "-1"], "must be a whole number, 0 to 16, got -1"),
        (["--speculative-config.num_speculative_tokens", "two"], "must be a whole number, 0 to 16, got 'two'"),
        (["--speculative-config.draft_kv", "both"], "draft_kv must be one of sharded, replicated; got 'both'"),
        (["--speculative-config.acceptance", "maybe"], "acceptance must be 'coupled' or 'rejection', got 'maybe'"),
        (["--speculative-config.pin", "3"], "pin is a mean acceptance length, 1 to 2 with 1 drafts, got 3"),
        (["--speculative-config.adaptive", "1"], "adaptive must be true or false, got 1"),
        (["--speculative-config.method"], "needs a value"),
        (["--gpu-memory-utilization", "90"], "above 0 and at most 1; got 90"),
        (["--revision", "main"], "is for a Hub id owner/name without @; the model is None"),
        (["a/b@c", "--revision", "main"], "is for a Hub id owner/name without @"),
        (["--structured-outputs-config.backend", "xgrammar"], "backend 'xgrammar' is not known; use llguidance"),
        (["--disable-access-log-for-endpoints", "/a,b"], "'b' must begin with /"),
        (["--root-path", "api"], "--root-path must begin with /; got 'api'"),
        (["--port", "70000"], "between 0 and 65535"),
        (["--max-logprobs", "-2"], "at least -1"),
        (["--shutdown-timeout", "nan"], "at least 0"),
        (["--chat-template", "no such file"], "neither a file nor a template"),
        (["--generation-config", "/no/such"], "use auto, vllm"),
        (["one", "--model", "two"], "two models"),
    ],
)
def test_refusals_say_what_to_change(capsys, argv, words):
    assert words in refusal(capsys, *argv)


def test_flags_without_meaning_are_accepted_with_a_warning_each():
    settings = parse(["--trust-remote-code", "--moe-backend", "auto", "--enforce_eager", "--swap-space=4"])
    assert sorted(line.split()[0] for line in settings.warnings) == [
        "--enforce-eager", "--moe-backend", "--swap-space", "--trust-remote-code"
    ]  # fmt: skip
    logs = [parse(words).options.log_requests for words in (["--enable-log-requests", "--disable-log-requests"], [])]
    assert logs == [False, False]
    settings = parse(["a/b", "--revision", "v1", "--load-format", "runai_streamer"])
    assert settings.llm["model"] == "a/b@v1" and settings.llm["load_format"] == "auto"
    assert settings.warnings == ("--load-format runai_streamer has no effect here: safetensors are read",)
    assert parse(["--load-format=dummy"]).llm["load_format"] == "dummy"
    old = parse(["--dcp-kv-cache-interleave-size", "8"])
    assert old.llm["cp_kv_cache_interleave_size"] == 8 and "deprecated" in old.warnings[0]


def test_what_an_llm_is_told_of_cache_and_drafts():
    assert parse(["--no-enable-prefix-caching"]).llm["enable_prefix_caching"] is False
    config = {"method": "mtp", "num_speculative_tokens": 16, "draft_kv": "replicated", "acceptance": "rejection"}
    config |= {"pin": None, "adaptive": True}
    settings = parse(["--speculative-config", json.dumps(config)])
    assert settings.llm["speculative_config"] == config and not settings.warnings and settings.options.pin is None
    assert parse(["--speculative-config", '{"num_speculative_tokens": 0}']).llm["speculative_config"] is not None


def test_a_pin_is_marked():
    """In the log, and in the fingerprint of every answer (see test_prefix.py)."""
    pinned = parse(["--speculative-config", '{"num_speculative_tokens": 5, "pin": 3.7}'])
    assert pinned.options.pin == 3.7 and "forced to 3.7, for benchmarks only" in pinned.warnings[0]


def test_templates_and_generation_files(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ 1 }}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    assert parse(["--chat-template", str(tmp_path / "t.jinja")]).llm["chat_template"] == "{{ 1 }}"
    assert parse(["--chat-template", "{{ 2 }}" + "x" * 5000]).llm["chat_template"].startswith("{{ 2 }}")
    assert parse(["--generation-config", str(tmp_path)]).options.sampling_defaults == {"temperature": 0.25}
    assert parse(["--generation-config", "vllm"]).options.sampling_defaults == {}


def test_the_environment_is_the_second_choice(monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "serve", lambda service, load, *rest: seen.append((service, load())) or 0)

    def run(*argv: str, **environment: str):
        assert serve.main(argv, make_llm=lambda arguments: arguments, environment=environment) == 0
        service, arguments = seen.pop()
        return service.options.api_keys, (arguments["speculative_config"] or {}).get("draft_kv")

    mtp = ("--speculative-config", '{"method": "mtp"}')
    assert run(*mtp) == ((), None)
    assert run(*mtp, VLLM_API_KEY="v") == (("v",), None)
    assert run(*mtp, VLLM_API_KEY="v", DCPJAX_API_KEY="d") == (("d",), None)
    assert run(*mtp, "--api-key", "f", DCPJAX_API_KEY="d") == (("f",), None)
    assert run(*mtp, VLLM_DCP_SHARD_DRAFT="0") == ((), "replicated")
    assert run(*mtp, VLLM_DCP_SHARD_DRAFT="1") == ((), "sharded")
    assert run(*mtp, "--speculative-config.draft_kv", "sharded", VLLM_DCP_SHARD_DRAFT="0") == ((), "sharded")


def test_debug_comes_from_the_line_or_the_environment(monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "serve", lambda service, load, *rest: seen.append(load()) or 0)

    def run(*argv: str, **environment: str) -> bool:
        assert serve.main(argv, make_llm=lambda arguments: arguments, environment=environment) == 0
        return seen.pop()["dcp_debug"]

    assert run() is run(VLLM_DCP_DEBUG="0") is run(VLLM_DCP_DEBUG="") is False
    assert run("--dcp-debug") is run(VLLM_DCP_DEBUG="1") is run("--dcp-debug", VLLM_DCP_DEBUG="0") is True
    assert run("--no-dcp-debug", VLLM_DCP_DEBUG="1") is False
