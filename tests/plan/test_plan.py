"""`python -m dcpjax.plan`: names and folders, figures that agree with the engine's, what fits, and refusals of one line."""

import json

import jax
import pytest

from dcpjax import LLM, build, plan
from dcpjax.build import EngineConfig
from dcpjax.forecast import Subject, forecast
from dcpjax.hub import TINY
from dcpjax.mesh import abstract_plan
from models.config import from_hf
from models.published import GLM_5_2
from models.stored import bytes_per_device

GLM = from_hf(GLM_5_2)
# Fewer layers are traced faster, and change nothing that is looked at here.
SHORT = from_hf({**GLM_5_2, "num_hidden_layers": 4})
GB = 10**9


def run(tmp_path, *argv: str) -> tuple[int, dict]:
    file = tmp_path / "plan.json"
    code = plan.main([*argv, "--json", str(file)])
    return code, json.loads(file.read_text())


def refusal(capsys, *argv: str) -> str:
    try:
        code = plan.main(argv)
    except SystemExit as error:
        code = error.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("dcpjax.plan: error: "), lines
    return lines[0]


def test_the_published_model_on_eight_devices(tmp_path, capsys):
    code, found = run(
        tmp_path, "--model", "glm-5.2-fp8", "--tp", "8", "--dcp", "4", "--gpu-memory", "141GB",
        "--kv-cache-dtype", "fp8", "--speculative-config.num_speculative_tokens", "3",
    )  # fmt: skip
    assert code == 0 and found["fits"] and found["refusal"] is None
    assert 94e9 < found["weight_bytes_per_device"] < 97e9
    assert found["weight_bytes_per_device"] == sum(found["weight_bytes_per_device_by_group"].values())
    assert found["kv_bytes_per_token_per_device"] == 79 * 656 / 4 + 22 * 132 / 4 == 13_682
    room = 0.92 * 141e9 - found["weight_bytes_per_device"]
    assert found["kv_tokens"] == (int(room // (13_682 * 64)) - 1) * 64
    assert 2.5 < found["step_floor_ms"] < 4.5
    layouts = {(x["dcp"], x["kv_cache_dtype"], x["draft_kv"], x["index_shards"]): x for x in found["layouts"]}
    assert len(layouts) == 26
    assert layouts[4, "fp8", "sharded", 4]["kv_tokens"] == found["kv_tokens"]
    best = layouts[8, "fp8", "sharded", 8]
    assert best["kv_bytes_per_token_per_device"] == 6_841 and best["requests"]["1M"] == best["kv_tokens"] >> 20
    text = capsys.readouterr().out
    for words in ("weights  ", "experts  ", "* ", "gather of queries", "Least time of a decode step", "fits"):
        assert words in text


@pytest.mark.parametrize("name", ["glm-5.2", "glm-5.2-fp8", "glm-5.2-nvfp4"])
def test_published_names(name):
    subject = plan.read_subject(name)
    assert (
        subject.cfg == GLM
        and subject.quantisation == {"5.2": None, "fp8": "fp8", "nvfp4": "nvfp4"}[name.split("-")[-1]]
    )


def test_folders_files_and_the_tiny_model(data):
    assert plan.read_subject(None) == plan.read_subject("tiny") == plan.read_subject(str(TINY / "config.json"))
    assert plan.read_subject(str(data / "glm-5.2")).cfg == GLM
    golden = plan.read_subject(str(data / "golden/q_fp8_block128"))
    assert golden.quantisation == "fp8"
    assert plan.read_subject("tiny", {"index_topk": 7}).cfg.indexer.topk == 7


def test_figures_are_those_of_an_engine(tmp_path):
    """Made on the same devices: bytes of weights and caches, tokens, the longest sequence."""
    arguments = {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 2,
        "enable_expert_parallel": True,
        "num_blocks": 40,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "dtype": "float32",
        "speculative_config": {"num_speculative_tokens": 1, "draft_kv": "replicated"},
    }
    found = forecast(plan.read_subject("tiny"), EngineConfig.read(arguments), 8 * GB)
    runner = LLM(**arguments).runner
    assert found.weight_bytes == bytes_per_device(runner.params)
    pools = bytes_per_device((runner.cache, runner.draft_cache))
    assert pools == found.chosen.bytes_per_token * runner.num_pages * runner.page_tokens
    assert found.kv_tokens == (runner.num_pages - 1) * runner.page_tokens == 39 * 64
    assert found.ready.limits == runner.limits and found.chosen.draft_kv == "replicated"


def test_the_cpu_is_planned_as_it_is_used(tmp_path):
    """Nothing of a device is asked for: the plan of a GPU is made on this machine, whose platform is another one."""
    found = forecast(Subject(SHORT), EngineConfig(tensor_parallel_size=8), 141 * GB)
    assert found.ready.net.plan.platform == "cuda" and found.ready.limits.max_num_seqs == 128
    assert jax.default_backend() == "cpu" and found.ready.net.options.kernels.sparse_mla == "mosaic"


def test_what_does_not_fit_is_printed_too(tmp_path, capsys):
    """In bfloat16 the weights alone are more than eight devices have. What is said to fit, fits."""
    code, found = run(tmp_path, "--model", "glm-5.2", "--tp", "8", "--dcp", "4")
    out, err = capsys.readouterr()
    assert code == 2 and not found["fits"] and found["kv_tokens"] == 0
    assert 188e9 < found["weight_bytes_per_device"] < 195e9 and found["step_floor_ms"] > 1
    assert len(err.splitlines()) == 1 and err.startswith("dcpjax.plan: does not fit: the weights take")
    assert "Least time of a decode step" in out and "Tokens that the cache could hold" in out
    assert found["changes"] == ["a checkpoint in FP8", "a checkpoint in NVFP4", "--tensor-parallel-size 16"]
    for model, size in (("glm-5.2-fp8", 8), ("glm-5.2-nvfp4", 8), ("glm-5.2", 16)):
        config = EngineConfig(tensor_parallel_size=size, decode_context_parallel_size=4)
        build.resolve(GLM, config, plan.read_subject(model).form_of, abstract_plan(size, 4), 141 * GB)


def test_a_step_needs_room_too(tmp_path, capsys):
    """Weights and cache fit, but what a step needs beside them does not; with the share that is told it does."""
    flags = ["--model", "glm-5.2-fp8", "--tp", "8", "--gpu-memory", "141GB", "--gpu-memory-utilization"]
    code, found = run(tmp_path, *flags, "0.99")
    assert code == 2 and not found["fits"] and found["kv_tokens"] > 0
    assert "gpu_memory_utilization 0.99 leaves 1,410,000,000: lower it" in found["refusal"]
    assert "LESS THAN THAT" in capsys.readouterr().out
    (change,) = found["changes"]
    assert run(tmp_path, *flags, change.split()[1])[0] == 0


@pytest.mark.parametrize(
    "config, words, change",
    [
        ({"max_model_len": 1 << 20}, "max_model_len 1048576 does not fit", "--decode-context-parallel-size 4"),
        ({"max_model_len": 1 << 20, "gpu_memory_utilization": 0.7}, "does not fit", "--max-model-len "),
        ({"max_model_len": 1 << 19, "gpu_memory_utilization": 0.7}, "does not fit", "--gpu-memory-utilization 0.95"),
        ({"num_blocks": 10**6}, "num_blocks 1000000 is", "no --num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 10**6}, "the cache may take 125,000 bytes", "no --kv-cache-memory-bytes"),
        ({"kv_cache_memory_bytes": 10**12}, "kv_cache_memory_bytes 1000000000000 is", "no --kv-cache-memory-bytes"),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_changes_with_which_it_fits(config, words, change):
    config = {"tensor_parallel_size": 8, "kv_cache_dtype": "bfloat16"} | config
    found = forecast(Subject(SHORT), EngineConfig(**config), 12 * GB)
    assert words in found.refusal and any(told.startswith(change) for told in found.changes), found.changes


@pytest.mark.parametrize(
    "argv, words",
    [
        (
            ["--model", "glm-5.3"],
            "neither a folder, nor a config.json, nor one of glm-5.2, glm-5.2-fp8, glm-5.2-nvfp4, tiny",
        ),
        (["--tp", "4", "--dcp", "3"], "must divide"),
        (["--kv-cache-dtype", "int4"], "invalid choice"),
        (["--speculative-config.num_speculative_tokens", "17"], "must be a whole number, 0 to 16"),
        (["--tensor-parallel"], "unknown argument '--tensor-parallel'; did you mean --tensor-parallel-size?"),
        (["--gpu-memory-utilization", "1.5"], "above 0 and at most 1"),
        (["--gpu-memory", "much"], "is not an amount such as 141GB"),
        (["--max-model-len", "2M", "--model", "glm-5.2-fp8", "--tp", "8"], "must be between 2"),
        (["--json", "/no/such/folder/plan.json"], "cannot be written"),
        (["--json", "/"], "cannot be written: give a file"),
        (["--gpu-memory", "141"], "'141' is 141 bytes, less than any device has"),
        (["--memory-bandwidth", "0"], "with the unit"),
        (["--context", "auto"], "is not a number of tokens such as 8192, 128K or 1M"),
        (
            ["--context", "2M", "--model", "glm-5.2-fp8", "--tp", "8"],
            "--context 2,097,152 is more than the longest sequence",
        ),
        (["--tp", "999999999"], "tensor_parallel_size must be at most 4,096"),
        (["--model", ""], "--model is empty"),
        (["--tp", "99999999999999999999"], "tensor_parallel_size must be below"),
        (["--max-num-batched-tokens", "10000000000000"], "max_num_batched_tokens must be below"),
        (["--max-num-batched-tokens", "2000000000"], "is more than 128 rows (max_num_seqs) of 4,096 tokens"),
    ],
)
def test_refusals_are_one_line(capsys, argv, words):
    assert words in refusal(capsys, *argv)


def test_amounts():
    assert [plan._amount(x) for x in ("141GB", "80GiB", "4.8TB", "128Ki", "1000", "1.5 G")] == [
        141 * GB, 80 << 30, 4_800 * GB, 1 << 17, 1000, 1_500_000_000
    ]  # fmt: skip
