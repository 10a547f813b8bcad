"""Times of every kernel beside the XLA arm, and what was predicted: `python -m dcpjax.bench kernels --json FILE`."""

import argparse
import json
import pathlib

import jax

from dcpjax.bench import kernels_experts, kernels_index, kernels_merge, kernels_mla, kernels_topk

PARTS = {
    "mla": kernels_mla.measure,
    "merge": kernels_merge.measure,
    "index": kernels_index.measure,
    "topk": kernels_topk.measure,
    "experts": kernels_experts.measure,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run, all by default")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints a line a figure as soon as it is known."""
    print(f"{len(jax.devices())} × {jax.devices()[0].device_kind}, jax {jax.__version__}")
    rows = []
    for part in args.only:
        for row in PARTS[part]():
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
