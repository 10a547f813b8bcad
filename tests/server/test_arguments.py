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
    assert (settings.host, settings.port, settings.shutdown_timeout) == ("127.0.0.1", 8000, 30)
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
        (["--max-num-seqs", "0"], "at least 1"),
        (["--max-model-len", "lots"], "not a length"),
        (["--speculative-config", "{"], "not valid JSON"),
        (["--speculative-config", "[1]"], "not a JSON object"),
        (["--speculative-config", '{"num_drafts": 1}'], "unknown keys ['num_drafts']"),
        (["--speculative-config.method"], "needs a value"),
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
    settings = parse(
        ["--trust-remote-code", "--moe-backend", "auto", "--enforce_eager", "--gpu-memory-utilization=0.9"]
    )
    assert sorted(line.split()[0] for line in settings.warnings) == [
        "--enforce-eager", "--gpu-memory-utilization", "--moe-backend", "--trust-remote-code"
    ]  # fmt: skip
    old = parse(["--dcp-kv-cache-interleave-size", "8"])
    assert old.llm["cp_kv_cache_interleave_size"] == 8 and "deprecated" in old.warnings[0]


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
