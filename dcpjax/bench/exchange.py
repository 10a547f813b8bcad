"""One layer of experts on many devices: a part of each expert everywhere, whole ones without exchange, and with one.

The exchange is the textbook one: tokens are dealt out, sent to the devices of their experts, and sent back. Room is kept for
every token on every device, as shapes must be known; so as many bytes travel as if every device asked for all tokens. The
engine does without: all its devices hold all tokens anyway.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcpjax import build, collectives, moe
from dcpjax.mesh import ALL, MeshPlan, make_plan
from models.config import MoeConfig

ROUNDS, DEVICES = 15, 8
# Hidden width, experts and their width: a layer that a CPU computes in a few milliseconds.
WIDTH, EXPERTS, INNER, PER_TOKEN = 512, 32, 256, 8
TOKENS = (8, 64, 256)


def computed(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    shared_gate: jax.Array, shared_up: jax.Array, shared_down: jax.Array, plan: MeshPlan,
) -> jax.Array:  # fmt: skip
    """`moe_ffn`, with its shapes and dtypes, of stacks `[E, …]` of one layer alone: `x [T, D]` → `[T, D]`."""
    stacks = gate[None], up[None], down[None]
    return moe.moe_ffn(x, experts, weight, *stacks, shared_gate, shared_up, shared_down, plan)


def exchanged(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    shared_gate: jax.Array, shared_up: jax.Array, shared_down: jax.Array, plan: MeshPlan,
) -> jax.Array:  # fmt: skip
    """`computed` of whole experts on devices, with its shapes and dtypes, by a padded exchange: `x [T, D]` → `[T, D]`.
    The devices must divide T."""
    n = plan.num_devices

    def send(parts: jax.Array) -> jax.Array:
        """Part i goes to device i; returned are the parts from every device."""
        return jax.lax.all_to_all(parts, ALL, split_axis=0, concat_axis=0)

    def body(x, experts, weight, gate, up, down, *shared):
        size, own = len(x) // n, gate.shape[0]
        mine = (jax.lax.dynamic_slice_in_dim(a, collectives.device_index() * size, size) for a in (x, experts, weight))
        tokens, chosen, share = mine
        wanted = jnp.any((chosen // own)[None] == jnp.arange(n)[:, None, None], axis=-1)
        tokens = send(jnp.where(wanted[..., None], tokens[None], 0)).reshape(len(x), -1)
        chosen, share = (send(jnp.broadcast_to(a, (n, *a.shape))).reshape(len(x), -1) for a in (chosen, share))
        out = moe.experts_everywhere(tokens, moe.own_experts(chosen, own), share, gate, up, down)
        back = jnp.sum(send(out.reshape(n, size, -1)), axis=0)
        return jax.lax.all_gather(back, ALL, tiled=True) + collectives.sum_devices(moe.swiglu(x, *shared))

    whole, into, out = plan.spec(), plan.spec("width", None), plan.spec(None, "width")
    stacks = plan.spec("experts", "expert_width", None), plan.spec("experts", None, "expert_width")
    specs = whole, whole, whole, stacks[0], stacks[0], stacks[1], into, into, out
    args = x, experts, weight, gate, up, down, shared_gate, shared_up, shared_down
    return plan.per_device(body, specs, whole)(*args)


def received(devices: int, per_token: int) -> dict[str, float]:
    """Values that a device receives of each of its tokens, over the width of a token, by arm.

    A sum of n copies is a scatter and a gather: 2 (n − 1)/n of all tokens. A padded exchange is as much, and what has come
    back is gathered, for all devices need all tokens again. "ragged" would send a token only where it has experts.
    """
    others = (devices - 1) / devices
    asked = 1 - (1 - 1 / devices) ** per_token
    return {"sum": 2 * others, "padded": 3 * others, "ragged": (2 * asked + 1) * others}


def inputs(moe_config: MoeConfig, width: int, tokens: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Random arguments of `computed`, float32 but for the chosen experts (int32): tokens `[T, D]`, experts and weights
    `[T, k]`, three stacks `[E, …]`, three matrices of a shared expert."""
    rng, m = np.random.default_rng(seed), moe_config

    def matrix(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    chosen = rng.random((tokens, m.num_experts)).argpartition(m.experts_per_token, axis=1)[:, : m.experts_per_token]
    stacks = [matrix(m.num_experts, *shape) for shape in ((m.width, width), (m.width, width), (width, m.width))]
    shared = [matrix(*shape) for shape in ((m.width, width), (m.width, width), (width, m.width))]
    return matrix(tokens, width), chosen.astype(np.int32), rng.random(chosen.shape, np.float32), *stacks, *shared


def arms(args: tuple[np.ndarray, ...], devices: int) -> dict[str, Callable[[], Any]]:
    """Compiled calls by name, `inputs` (`[T, D]` float32 and on) given. Experts lie as each arm wants them."""
    made = {}
    for name, whole, layer in (("parts", False, computed), ("sum", True, computed), ("padded", True, exchanged)):
        plan = make_plan(devices, 1, whole)
        into, out = plan.spec("experts", "expert_width", None), plan.spec("experts", None, "expert_width")
        wide = plan.spec("width", None), plan.spec("width", None), plan.spec(None, "width")
        specs = *(plan.spec(),) * 3, into, into, out, *wide
        placed = [jax.device_put(x, jax.NamedSharding(plan.mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        made[name] = functools.partial(jax.jit(functools.partial(layer, plan=plan)), *placed)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's arguments, and what runs it."""
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints a line for each number of tokens: medians in ms, and the bytes that are predicted."""
    build.start_devices(DEVICES, 1)
    config = MoeConfig(EXPERTS, PER_TOKEN, INNER, INNER, 1, 1, True, 1.0)
    rows, predicted = [], received(DEVICES, PER_TOKEN)
    for tokens in TOKENS:
        calls = arms(inputs(config, WIDTH, tokens), DEVICES)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS + 1):
            for name, call in calls.items():
                begin = time.perf_counter()
                jax.block_until_ready(call())
                times[name].append(time.perf_counter() - begin)
        medians = {name: statistics.median(spent[1:]) * 1e3 for name, spent in times.items()}
        rows.append({"tokens": tokens, "ms": medians, "received": predicted})
        told = ", ".join(f"{name} {ms:.2f} ms" for name, ms in medians.items())
        print(f"{tokens} tokens: {told}; padded over sum {medians['padded'] / medians['sum']:.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
