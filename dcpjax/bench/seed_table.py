"""The table that this engine was started for: what each layout of the cache holds, hits, accepts and how fast it is.

One row for each dcp size and draft layout. No cell is a claim about a large machine: each says where it comes from.

* kv_tokens: GLM-5.2's shapes with the fp8 record in 35 GiB a device, by the shapes of the pools (`capacity_rows`).
* hit_rate, acceptance_length: the tiny model on the same chats twice (`tiny_rows`); equal in all rows, or it is a fault.
* tokens_per_second: a toy network on this machine, one user, acceptance pinned (`draft_ratio`).
* predicted_ratio, measured_ratio: that speed over the one with the replicated draft, so 1 for the replicated rows.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from dcpjax import build
from dcpjax.bench import arms, capacity_rows, draft_ratio, tiny_rows

DCPS = (2, 4, 8)
COLUMNS = (
    "dcp",
    "draft_kv",
    "kv_tokens",
    "hit_rate",
    "acceptance_length",
    "tokens_per_second",
    "predicted_ratio",
    "measured_ratio",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    arms.add_arguments(parser, run)


def run(args: argparse.Namespace) -> None:
    """Prints the table, and before it what it was made from."""
    if args.quick:
        arms.compile_carelessly()
    figures = measure(args.quick, lambda line: print(line, flush=True))
    print(*table(figures["rows"]), sep="\n")
    print(
        f"tokens of all rows equal: toy {figures['equal']['toy']}, tiny model {figures['equal']['tiny']}; acceptance "
        f"length equal: {figures['equal']['acceptance_length']}; load {figures['machine']['load']}"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def measure(quick: bool = False, say=lambda line: None, dcps: Sequence[int] = DCPS) -> dict[str, Any]:
    """Figures: `rows`, one for each dcp size and layout, and beside them what else was measured. 4 must be in `dcps`."""
    build.start_devices(None, max(DCPS))
    build.keep_compiled_programs()
    before = arms.machine()
    toy = draft_ratio.measure(dcps, draft_ratio.QUICK if quick else draft_ratio.Sizes(), say)
    tiny_sizes = tiny_rows.QUICK if quick else tiny_rows.Sizes()
    rows, tiny = [], []
    for dcp in dcps:
        for draft_kv in draft_ratio.LAYOUTS:
            capacity = capacity_rows.measure(dcp, draft_kv)
            tiny.append(tiny_rows.measure(dcp, draft_kv, tiny_sizes))
            arms.forget_programs()
            rows.append(_row(dcp, draft_kv, capacity, tiny[-1], toy["rows"][dcp]))
            say(f"dcp {dcp}, {draft_kv}: tiny model accepts {tiny[-1]['acceptance_length']:.3f} a step")
    by_layout = {(row["dcp"], row["draft_kv"]): row["kv_tokens"] for row in rows}
    return {
        "rows": rows,
        "kv_ratio": {dcp: by_layout[dcp, "sharded"] / by_layout[dcp, "replicated"] for dcp in dcps},
        "equal": {
            "toy": toy["equal_tokens"] and all(point["equal_tokens"] for point in toy["points"]),
            "tiny": len({each["text"] for each in tiny}) == 1 and all(each["equal_rounds"] for each in tiny),
            "acceptance_length": len({each["acceptance_length"] for each in tiny}) == 1,
        },
        "users": toy.get("users"),
        "toy": {name: toy[name] for name in ("sizes", "length", "points", "fits")},
        "machine": arms.machine() | {"load_before": before["load"]},
    }


def _row(dcp: int, draft_kv: str, capacity: dict, tiny: dict, toy: dict) -> dict[str, Any]:
    sharded = draft_kv == "sharded"
    speed = toy["tokens_per_second"][draft_kv]
    return {
        "dcp": dcp,
        "draft_kv": draft_kv,
        "kv_tokens": capacity["kv_tokens"],
        "hit_rate": tiny["hit_rate"],
        "acceptance_length": tiny["acceptance_length"],
        "tokens_per_second": speed["median"],
        "predicted_ratio": toy["predicted_ratio"] if sharded else 1.0,
        "measured_ratio": toy["measured_ratio"] if sharded else 1.0,
        "tokens_per_second_quartiles": speed["quartiles"],
        "step_ms": toy["step_seconds"][draft_kv]["median"] * 1e3,
        "bytes_per_token": capacity["bytes_per_token"],
        "hit_rate_second_round": tiny["hit_rate_second_round"],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines to read: a header and one for each row."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in COLUMNS]
        lines.append("| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in cells) + " |")
    return lines
