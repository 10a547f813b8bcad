"""Times of every kernel beside the XLA arm, and what was predicted: `python -m dcpjax.bench kernels --json FILE`."""

import argparse
import json
import pathlib

import jax

from dcpjax.bench import (
    chain,
    kernels_experts,
    kernels_index,
    kernels_merge,
    kernels_mla,
    kernels_projection,
    kernels_topk,
)

PARTS = {
    "mla": kernels_mla.cases,
    "merge": kernels_merge.cases,
    "index": kernels_index.cases,
    "topk": kernels_topk.cases,
    "experts": kernels_experts.cases,
    "projections": kernels_projection.cases,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run, all by default")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints a line a figure as soon as it is known."""
    print(f"{len(jax.devices())} × {jax.devices()[0].device_kind}, jax {jax.__version__}")
    rows = {}
    for row in chain.measure([case for part in args.only for case in PARTS[part]()]):
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        figures = ("us", "gb_per_s", "share", "predicted_us", "gpu_us", "gpu_share")
        # Its second row takes the place of a case's first.
        rows[tuple((k, v) for k, v in row.items() if k not in figures)] = row
        if args.json:
            args.json.write_text(json.dumps(list(rows.values()), indent=1))
