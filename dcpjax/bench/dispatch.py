"""Host time to dispatch one jitted step with the real model's parameter tree.

The arrays are tiny, the tree is GLM-5.2's: what is timed is what Python and the runtime do per argument. The other arm
is the same model with one array per layer and weight, as a checkpoint has it. Prediction: time grows with the number of
arrays, so the arms differ as their leaf counts do.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax import build
from dcpjax.cache import PagedCache, index_record, latent_record, make_pool
from dcpjax.layout import CacheLayout
from dcpjax.mesh import MeshPlan, make_plan
from dcpjax.step import empty_state
from models.config import from_hf
from models.params import Weight, declare, is_weight

CALLS, ROUNDS = 100, 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    parser.add_argument("--config", type=pathlib.Path, required=True, help="config.json of the real model")
    parser.add_argument("--tensor-parallel-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints a line per mesh: median of both arms in ms, their ratio and the predicted one."""
    build.start_devices(max(args.tensor_parallel_sizes), 1)
    cfg = from_hf(json.loads(args.config.read_text()))
    weights = jax.tree.leaves(declare(cfg), is_leaf=is_weight)
    layers = [w for w in weights for _ in range(_arrays(w))]
    rows = []
    for size in args.tensor_parallel_sizes:
        plan = make_plan(size, size)
        arms = {
            "stacked": _arm(plan, len(weights)),
            "per layer": _arm(plan, len(layers)),
        }
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(ROUNDS):  # interleaved, so that both see the same machine
            for name, call in arms.items():
                times[name].append(call())
        stacked, per_layer = (statistics.median(times[name]) * 1e3 for name in arms)
        row = {
            "devices": size,
            "leaves": [len(weights), len(layers)],
            "stacked_ms": stacked,
            "per_layer_ms": per_layer,
            "ratio": per_layer / stacked,
            "predicted_ratio": len(layers) / len(weights),
        }
        rows.append(row)
        print(
            f"T={size}: {len(weights)} stacked leaves {stacked:.3f} ms, {len(layers)} leaves {per_layer:.3f} ms, "
            f"ratio {row['ratio']:.1f} (predicted {row['predicted_ratio']:.1f})",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def _arrays(w: Weight) -> int:
    """Arrays of this weight when every layer has its own; experts of a layer stay together."""
    return len(w.layers) or 1


def _arm(plan: MeshPlan, num_leaves: int) -> Callable[[], float]:
    """A function that times `CALLS` dispatches of a step-like program: weights, donated caches and rows, one buffer."""
    whole = plan.sharding()
    params = [jax.device_put(np.zeros(1, np.float32), whole) for _ in range(num_leaves)]
    layout = CacheLayout(2, plan.dcp, plan.dcp)
    pools = (latent_record(4, 2, "float32"), index_record(4, "float32"))
    cache = PagedCache(*(make_pool(1, layout, record, plan) for record in pools))
    state = jax.jit(lambda: empty_state(2, 8), out_shardings=whole)()
    packed = np.zeros(256, np.int32)
    shardings = jax.tree.map(lambda x: x.sharding, cache)

    def body(params: Any, cache: PagedCache, state: Any, packed: jax.Array):
        return cache, state, jnp.zeros((1, 1), jnp.int32)

    # The weights must stay arguments although the program is empty.
    call = jax.jit(body, donate_argnums=(1, 2), out_shardings=(shardings, whole, whole), keep_unused=True)
    held = [cache, state]

    def once() -> None:
        held[0], held[1], _ = call(params, held[0], held[1], packed)

    once()
    jax.block_until_ready(held)

    def timed() -> float:
        spent = 0.0
        for _ in range(CALLS):
            begin = time.perf_counter()
            once()
            spent += time.perf_counter() - begin
            jax.block_until_ready(held[0])
        return spent / CALLS

    return timed
