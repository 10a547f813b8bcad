"""What runs together and what is refused, as a table: `python -m dcpjax.support > docs/support.md`.

Each row is one configuration put through the checks that also run at every start (`build.resolve`), on GLM-5.2's
published shape, so the table cannot say anything else than the engine does.
"""

import argparse
import dataclasses
import json
import pathlib

from dcpjax import build
from dcpjax.build import EngineConfig
from dcpjax.errors import ConfigError
from dcpjax.server import rows
from dcpjax.spec import Speculation
from models.config import ModelConfig, from_hf

# Memory is not what this table is about: enough blocks for any length.
_BASE = EngineConfig(num_blocks=20_000, dtype="bfloat16", max_num_seqs=128, max_num_batched_tokens=2048)

_CASES: dict[str, list[dict]] = {
    "Devices and dcp": [
        {"tensor_parallel_size": t, "decode_context_parallel_size": n}
        for t, n in ((1, 1), (4, 1), (4, 4), (8, 2), (8, 4), (8, 8), (4, 3), (4, 8), (16, 4))
    ],
    "Experts": [{"tensor_parallel_size": t, "expert_parallel": whole} for t in (1, 3, 8) for whole in (False, True)],
    "Block size and interleave, dcp 4": [
        {"decode_context_parallel_size": 4, "block_size": b, "interleave": i}
        for b, i in ((64, 1), (64, 16), (64, 32), (16, 4), (4, 1), (6, 1))
    ],
    "KV cache": [{"kv_cache_dtype": kind} for kind in ("auto", "bfloat16", "float32", "fp8", "int4")],
    "Index keys and draft rows, dcp 4": [
        {"decode_context_parallel_size": 4, "index_shards": s, "draft_kv": d}
        for s, d in ((4, "sharded"), (4, "replicated"), (1, "sharded"), (1, "replicated"), (2, "sharded"))
    ],
    "Drafts, dcp 4 (`speculative_config`)": [
        {"decode_context_parallel_size": 4, "speculative_config": config}
        for config in (
            *({"num_speculative_tokens": k} for k in (0, 1, 3, 5, 15, 16, 17)),
            *({"num_speculative_tokens": 5, "draft_kv": kind} for kind in ("sharded", "replicated", "both")),
            *({"num_speculative_tokens": 5, "acceptance": rule} for rule in ("coupled", "rejection", "greedy")),
            *({"num_speculative_tokens": 5, "pin": pin} for pin in (3.7, 6.5)),
            {"method": "mtp", "num_speculative_tokens": 5, "adaptive": True},
            {"method": "eagle"},
        )
    ],
    "Merge": [{"decode_context_parallel_size": 4, "backend": name} for name in ("ag_rs", "a2a", "psum", "nccl")],
    "Limits": [
        {"max_model_len": 1_048_576},
        {"max_model_len": 2_000_000},
        {"max_num_seqs": 128, "max_num_batched_tokens": 64},
        {"max_num_seqs": 128, "max_num_batched_tokens": 512, "speculative_config": {"num_speculative_tokens": 5}},
        {"num_blocks": 1},
    ],
}


def render(cfg: ModelConfig) -> str:
    """The page, Markdown. Needs eight devices."""
    lines = [
        "# What is supported",
        "",
        "Made by `python -m dcpjax.support tests/data/glm-5.2/config.json` from the checks that run at start; a test",
        "compares. Eight devices; GLM-5.2's shape. What is refused is refused before any weight is read.",
    ]
    for title, cases in _CASES.items():
        lines += ["", f"## {title}", "", "| configuration | |", "|---|---|"]
        for case in cases:
            words = ", ".join(f"`{name}={value}`" for name, value in case.items())
            lines.append(f"| {words} | {_outcome(cfg, case)} |")
    return "\n".join([*lines, *rows.render()]) + "\n"


def _outcome(cfg: ModelConfig, case: dict) -> str:
    case = dict(case)
    try:
        case["speculation"], draft_kv = Speculation.read(case.pop("speculative_config", None))
        build.resolve(cfg, dataclasses.replace(_BASE, **{"draft_kv": draft_kv, **case}))
    except ConfigError as error:
        return f"refused: {error}"
    return "runs"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dcpjax.support", description=__doc__)
    parser.add_argument("config", type=pathlib.Path, help="config.json of GLM-5.2")
    args = parser.parse_args()
    build.start_devices(8, 1)
    print(render(from_hf(json.loads(args.config.read_text()))), end="")


if __name__ == "__main__":
    main()
