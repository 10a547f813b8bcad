"""Merging the parts of two ranks after one all-to-all of outputs and LSE in one array; on Hopper, through boxes as well.

Prediction: 14 µs of latency, the packed bytes that leave a rank at 200 GB/s, and 3 µs for each of two small kernels; through
boxes 4 µs, a launch and a write to the other rank that it waits for, and the bytes at 300 GB/s. Opening them, once a chain, is
not in it: two launches for all calls.
"""

import functools

import jax
import jax.numpy as jnp

from dcpjax.bench.chain import Case
from dcpjax.collectives import merge_ranks, open_boxes
from dcpjax.mesh import make_plan

HEADS, VALUE, RANKS = 64, 512, 2
TOKENS = (1, 16, 64, 128)


def cases(tokens: tuple[int, ...] = TOKENS, arms: tuple[str, ...] = ("triton", "xla", "mosaic")) -> list[Case]:
    """One for every number of tokens and arm; none where there are fewer than two devices."""
    if len(jax.devices()) < RANKS:
        return []
    plan = make_plan(RANKS, RANKS)
    ranks, own = plan.spec("ranks"), plan.spec("devices")

    def inputs(count):
        out = jax.random.normal(jax.random.key(1), (RANKS, count, HEADS, VALUE), jnp.bfloat16)
        lse = jax.random.normal(jax.random.key(2), (RANKS, count, HEADS), jnp.float32)
        return tuple(jax.device_put(x, plan.sharding("ranks")) for x in (out, lse))

    def begin(count, arm, out, lse):
        def opened():
            return jax.tree.map(lambda x: x[None], open_boxes(count, HEADS, VALUE, jnp.bfloat16))

        # In the same program, whose collective lets nobody past before all have loaded its kernels.
        return out, lse, plan.per_device(opened, (), own)() if arm == "mosaic" else None

    found = []
    for count in tokens:
        for arm in arms:
            if arm == "mosaic" and not (plan.hopper and plan.peers):
                continue

            def merge(number, out, lse, boxes, arm=arm):
                def body(out, lse, boxes):
                    return merge_ranks(out[0], lse[0], "a2a", arm, jax.tree.map(lambda x: x[0], boxes))

                return plan.per_device(body, (ranks, ranks, own), plan.spec(None, "heads", None))(out, lse, boxes)

            nbytes = count * HEADS // RANKS * (VALUE + 2) * 2
            found.append(
                Case(
                    "lse merge",
                    arm,
                    {"tokens": count},
                    merge,
                    functools.partial(inputs, count),
                    nbytes,
                    4 + nbytes / 300e9 * 1e6 if arm == "mosaic" else 20 + nbytes / 200e9 * 1e6,
                    placed=True,
                    begin=functools.partial(begin, count, arm),
                )
            )
    return found
