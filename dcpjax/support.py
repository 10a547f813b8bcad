"""What runs together and what is refused, as a table: `python -m dcpjax.support > docs/support.md`.

Each row is one configuration put through the checks that also run at every start (`build.resolve`), on GLM-5.2's
published shape, so the table cannot say anything else than the engine does.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dcpjax import build
from dcpjax.build import EngineConfig
from dcpjax.errors import ConfigError
from dcpjax.forecast import Subject
from dcpjax.mesh import abstract_plan
from dcpjax.server import rows
from models.config import from_hf
from models.quantconfig import quantization_of

# Arguments of `LLM`. Memory is not what most of this table is about: enough blocks for any length.
_BASE = {"num_blocks": 20_000, "dtype": "bfloat16", "max_num_seqs": 128, "max_num_batched_tokens": 2048}
_H200 = 134 * 10**9

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
_PACKED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
_FORMATS: dict[str, dict | None] = {"BF16": None, "FP8": _FP8, "NVFP4": _NVFP4}
_DCP4 = {"decode_context_parallel_size": 4}


def _devices(*pairs: tuple[int, int]) -> list[dict]:
    return [{"tensor_parallel_size": t, "decode_context_parallel_size": n} for t, n in pairs]


# Title → its rows, each the arguments of `LLM` and what the checkpoint or the devices are.
_CASES: dict[str, list[dict]] = {
    "Devices and dcp": _devices((1, 1), (4, 1), (4, 4), (8, 2), (8, 4), (8, 8), (6, 3), (4, 3), (4, 8), (16, 4)),
    "Experts": [
        {"tensor_parallel_size": t, "enable_expert_parallel": whole, "quantization_config": form}
        for t in (3, 8)
        for whole in (False, True)
        for form in _FORMATS.values()
    ],
    "Checkpoints (`quantization_config` of `config.json`)": [
        {"quantization_config": form}
        for form in (
            *(None, _FP8, _NVFP4, _PACKED),
            *({**_FP8, "weight_block_size": [64, 64]}, {**_FP8, "fmt": "e5m2"}, {**_NVFP4, "quant_algo": "FP8"}),
            *({**_NVFP4, "group_size": 32}, {**_PACKED, "format": "int-quantized"}, {"quant_method": "awq"}),
        )
    ],
    "Networks (`hf_overrides`, or the same in `config.json`)": [
        {"hf_overrides": keys, **more}
        for keys, more in (
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 8e6}}, {}),
            ({"n_group": 8, "topk_group": 4}, {}),
            ({"n_group": 3}, {}),
            ({"attention_bias": True}, {}),
            ({"num_nextn_predict_layers": 0}, {}),
            ({"num_nextn_predict_layers": 0}, {"speculative_config": {"num_speculative_tokens": 3}}),
            ({"num_nextn_predict_layers": 2}, {}),
            ({"sliding_window": 128}, {}),
        )
    ],
    "Block size and interleave, dcp 4": [
        {**_DCP4, "block_size": b, "cp_kv_cache_interleave_size": i}
        for b, i in ((64, 1), (64, 16), (64, 32), (16, 4), (4, 1), (6, 1))
    ],
    "KV cache": [
        {**where, "kv_cache_dtype": kind}
        for where in ({}, _DCP4)
        for kind in ("auto", "bfloat16", "float32", "fp8", "fp8_e4m3", "int4")
    ],
    "Index keys and draft rows, dcp 4": [
        {**_DCP4, "index_shards": s, "speculative_config": {"num_speculative_tokens": 3, "draft_kv": d}}
        for s, d in ((4, "sharded"), (4, "replicated"), (1, "sharded"), (1, "replicated"), (2, "sharded"))
    ],
    "Drafts, dcp 4": [
        {**_DCP4, "speculative_config": config}
        for config in (
            *({"num_speculative_tokens": k} for k in (0, 1, 3, 5, 15, 16, 17)),
            *({"num_speculative_tokens": 5, "draft_kv": kind} for kind in ("sharded", "replicated", "both")),
            *({"num_speculative_tokens": 5, "acceptance": rule} for rule in ("coupled", "rejection", "greedy")),
            *({"num_speculative_tokens": 5, "pin": pin} for pin in (3.7, 6.5)),
            {"method": "mtp", "num_speculative_tokens": 5, "adaptive": True},
            {"method": "eagle"},
        )
    ],
    "Merge": [{**_DCP4, "dcp_comm_backend": name} for name in ("ag_rs", "a2a", "psum", "nccl")],
    "Kernels on NVIDIA GPUs": [
        {"platform": "cuda", "kernels": kernels, **more}
        for kernels, more in (
            ("auto", {}),
            ("auto", {"dtype": "float32"}),
            ("auto", {"kv_cache_dtype": "fp8"}),
            ("xla", {}),
            ({"experts": "xla"}, {}),
            ({"merge": "xla", "invariant": True}, {}),
            ({"topk": "cub"}, {}),
            ({"attention": "triton"}, {}),
            ("flash", {}),
            ({"sparse_mla": "triton"}, {"hf_overrides": {"kv_lora_rank": 448}}),
            ({"indexer": "triton"}, {"hf_overrides": {"index_head_dim": 96}}),
        )
    ],
    "Kernels on CPU": [
        {"kernels": kernels} for kernels in ("auto", "xla", {"sparse_mla": "triton"}, {"experts": "interpret"})
    ],
    "Memory of H200s (JAX takes 134 of 141 GB)": [
        {**sizes, "quantization_config": form, "num_blocks": None, "gpu_memory": _H200, **more}
        for sizes, form, more in (
            ({"tensor_parallel_size": 8}, None, {}),
            ({"tensor_parallel_size": 16}, None, {}),
            ({"tensor_parallel_size": 8}, _FP8, {}),
            ({"tensor_parallel_size": 8}, _FP8, {"max_model_len": 1 << 20}),
            ({"tensor_parallel_size": 8, "decode_context_parallel_size": 8}, _FP8, {"max_model_len": 1 << 20}),
            ({"tensor_parallel_size": 8}, _FP8, {"gpu_memory_utilization": 0.6}),
            ({"tensor_parallel_size": 8}, _FP8, {"gpu_memory_utilization": 90}),
            ({"tensor_parallel_size": 8}, _FP8, {"kv_cache_memory_bytes": 10**6}),
            ({"tensor_parallel_size": 4}, _NVFP4, {}),
        )
    ],
    "Limits": [
        {"max_model_len": 1_048_576},
        {"max_model_len": 2_000_000},
        {"max_num_seqs": 128, "max_num_batched_tokens": 64},
        {"max_num_seqs": 128, "max_num_batched_tokens": 512, "speculative_config": {"num_speculative_tokens": 5}},
        {"num_blocks": 1},
        {"tensor_parallel_size": 0},
        {"block_size": 64.0},
    ],
}


def render(raw: Mapping[str, Any]) -> str:
    """The page, Markdown, for the network of this `config.json`. Needs eight devices."""
    lines = [
        "# What is supported",
        "",
        "Made by `python -m dcpjax.support tests/data/glm-5.2/config.json` from the checks that run at start; a test",
        "compares. GLM-5.2's shape; eight CPU devices where no others are named. What is refused is refused before any",
        "weight is read. Names are those of `LLM`.",
    ]
    for title, cases in _CASES.items():
        lines += ["", f"## {title}", "", "| configuration | |", "|---|---|"]
        lines += [f"| {_words(case)} | {outcome(raw, case)} |" for case in cases]
    return "\n".join([*lines, *rows.render()]) + "\n"


def _words(case: Mapping[str, Any]) -> str:
    formats = {json.dumps(form): name for name, form in _FORMATS.items()}
    shown = {
        name: value for name, value in case.items() if name not in ("platform", "gpu_memory") and value is not None
    }
    if len(case) > 1 and "quantization_config" in case:
        shown["weights"] = formats[json.dumps(case["quantization_config"])]
        shown.pop("quantization_config", None)
    return ", ".join(f"`{name}={value}`" for name, value in shown.items()) or "none"


def outcome(raw: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """ "runs", or why not. `case`: arguments of `LLM`; "quantization_config" of the checkpoint; "platform" and "gpu_memory"
    of devices that are not there."""
    arguments = {**_BASE, **case}
    form, memory = arguments.pop("quantization_config", None), arguments.pop("gpu_memory", None)
    platform = arguments.pop("platform", None if memory is None else "cuda")
    try:
        raw = {**raw, "quantization_config": form}
        subject = Subject(from_hf(raw, arguments.pop("hf_overrides", None)), quantization_of(raw))
        config = EngineConfig.read(arguments)
        sizes = config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_parallel
        plan = None if platform is None else abstract_plan(*sizes, platform=platform)
        build.resolve(subject.cfg, config, subject.form_of, plan, memory)
    except ConfigError as error:
        return f"refused: {error}"
    return "runs"


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(prog="python -m dcpjax.support", description=__doc__)
    parser.add_argument("config", type=pathlib.Path, help="config.json of GLM-5.2")
    args = parser.parse_args()
    build.start_devices(8, 1)
    print(render(json.loads(args.config.read_text())), end="")


if __name__ == "__main__":
    main()
