"""Merging through boxes: lowered for H200s that are not there, and on two that are. Its handshake is in test_boxes.py."""

import functools
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import collectives
from dcpjax.collectives import merge_ranks
from dcpjax.mesh import abstract_plan, make_plan
from dcpjax.pallas_kernels.boxes import BoxConfig
from tests.kernels.test_lse_merge import parts

ROOT = pathlib.Path(__file__).parent.parent.parent


def merges(plan, heads, tokens, width, dtype, backend, count=3, looped=False):
    """A program of `count` merges of `tokens` tokens each, of inputs `[ranks, T, …]` that differ; `looped`: in a while loop."""
    ranks, own = plan.spec("ranks"), plan.spec("devices")
    deal = plan.spec(None, "heads", None)

    def opened():
        return jax.tree.map(lambda x: x[None], collectives.open_boxes(max(tokens), heads, width, dtype))

    def one(out, lse, boxes):
        return merge_ranks(out[0], lse[0], "a2a", "xla", jax.tree.map(lambda x: x[0], boxes))

    def run(*inputs):
        boxes = plan.per_device(opened, (), own)() if backend == "mosaic" else None
        call = plan.per_device(one, (ranks, ranks, own), deal)
        found, before = [], jnp.zeros(())

        def merge(before, number, out, lse):
            # What a layer does: the next merge is of what came from the one before.
            out = out * (1 + number / 8).astype(out.dtype) + (before * 0).astype(out.dtype)
            merged = call(out, lse * (1 + number / 8), boxes)
            return jnp.nan_to_num(merged[0, 0, 0]), merged

        for out, lse in zip(inputs[::2], inputs[1::2], strict=True):
            step = functools.partial(merge, out=out, lse=lse)
            if looped:
                before, some = jax.lax.scan(step, before, jnp.arange(count, dtype=jnp.float32))
            else:
                some = []
                for number in range(count):
                    before, merged = step(before, jnp.float32(number))
                    some.append(merged)
                some = jnp.stack(some)
            found.append(some)
        return found

    return run


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("ranks, tokens, heads, width, dtype", [
    (2, (16, 128), 64, 512, jnp.bfloat16), (4, (3, 1), 12, 256, jnp.float32),
])  # fmt: skip
def test_lowers_for_h200s(ranks, tokens, heads, width, dtype, looped):
    """One kernel that makes boxes, one for every number of tokens, and no collective but that of the addresses."""
    plan = abstract_plan(ranks, ranks)
    shape = jax.ShapeDtypeStruct
    args = [x for t in tokens for x in (shape((ranks, t, heads, width), dtype), shape((ranks, t, heads), jnp.float32))]
    run = merges(plan, heads, tokens, width, dtype, "mosaic", count=1, looped=looped)
    with jax.sharding.use_abstract_mesh(plan.mesh):
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1 + len(tokens)
    assert text.count(f"mov.b32 left, {2**30}; again:") == len(tokens)  # no wait is without a bound
    assert text.count('"stablehlo.all_gather"') == 1
    assert "all_to_all" not in text
    assert "uses_xla_collective_metadata = true" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    "ranks, tokens, heads, width, dtype, looped",
    [
        (2, (1, 16, 5), 64, 512, "bfloat16", True),
        (2, (128,), 64, 512, "bfloat16", False),
        (2, (3, 7), 10, 128, "float32", True),
        (4, (16, 1, 3), 64, 512, "bfloat16", True),
        (4, (5,), 12, 256, "float32", False),
    ],
)
def test_equals_the_all_to_all_on_gpus(ranks, tokens, heads, width, dtype, looped):
    """All numbers of tokens through the same boxes; 21 times, for what depends on who is first."""
    if jax.device_count() < ranks:
        pytest.skip("needs more GPUs")
    plan = make_plan(ranks, ranks)
    assert plan.peers
    inputs = [parts(ranks, t, heads, dtype, width) for t in tokens]
    args = [jax.device_put(x, plan.sharding("ranks")) for pair in inputs for x in pair]
    count = 20 if looped else 3
    want, run = (
        jax.jit(merges(plan, heads, tokens, width, jnp.dtype(dtype), backend, count, looped))
        for backend in ("xla", "mosaic")
    )
    # Compared where they are: bringing them to the host takes longer than all the rest.
    far = jax.jit(lambda a, b: [jnp.max(jnp.abs(x - y) / (1 + jnp.abs(y))) for x, y in zip(a, b, strict=True)])
    other = jax.jit(lambda a, b: [jnp.sum(bits(x) != bits(y)) for x, y in zip(a, b, strict=True)])
    first, expected = run(*args), want(*args)
    assert max(map(float, far(first, expected))) < 1e-5
    for merged, (_, lse) in zip(first, inputs, strict=True):
        empty = ~np.isfinite(lse).any(0)
        assert empty[0].all()
        assert not jnp.any(merged[:, np.nonzero(empty)[0], np.nonzero(empty)[1]])
    for _ in range(20):
        assert sum(map(int, other(run(*args), first))) == 0


def bits(x: jax.Array) -> jax.Array:
    """Of float32 values, so that NaN equals itself and −0 is not 0."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def faulty(kind: str, plan):
    """A program of one merge of 16 tokens that waits for half a second at most. kind: "none", "absent", rank 1 writes to
    itself what rank 0 should get, or "copied", flags are elsewhere than they were when others heard of them."""
    from dcpjax.pallas_kernels.lse_merge_mosaic import merge_boxed

    def body(lse):
        boxes = collectives.open_boxes(16, 64, 512, jnp.bfloat16)
        if kind == "absent":
            own = boxes.addresses[boxes.rank]
            boxes = boxes.replace(addresses=jnp.where(boxes.rank == 1, own, boxes.addresses))
        if kind == "copied":
            boxes = boxes.replace(flags=jnp.zeros_like(boxes.flags))
        out = jnp.ones((16, 64, 512), jnp.bfloat16)
        return merge_boxed(out, lse, boxes, config=BoxConfig(looks=10**6))

    return plan.per_device(body, plan.spec(), plan.spec(None, "heads", None))


def show_fault(kind: str) -> None:
    """Prints how that program ends, and ends the process: its GPUs are of no more use to it."""
    if jax.device_count() < 2:
        print("needs more GPUs", flush=True)
        os._exit(0)
    lse = jnp.zeros((16, 64))
    run = jax.jit(faulty(kind, make_plan(2, 2))).lower(lse).compile()
    begin = time.perf_counter()
    try:
        merged = jax.block_until_ready(run(lse))
        print("merged", float(jnp.sum(merged)))
    except jax.errors.JaxRuntimeError as error:
        print("failed:", str(error)[:500])
    print(f"after {time.perf_counter() - begin:.1f} s", flush=True)
    os._exit(0)


@pytest.mark.parametrize("kind", ["none", "absent", "copied"])
def test_faults_lower_for_h200s(kind):
    plan = abstract_plan(2, 2)
    with jax.sharding.use_abstract_mesh(plan.mesh):
        traced = jax.jit(faulty(kind, plan)).trace(jax.ShapeDtypeStruct((16, 64), jnp.float32))
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "absent", "copied"])
def test_faults_end_in_a_failed_launch_on_gpus(kind):
    """Each in a process of its own, which must not end in any other way, nor take longer than a start and a second."""
    command = f"from tests.kernels.test_lse_merge_mosaic import show_fault; show_fault({kind!r})"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )  # fmt: skip
    print(done.stdout)
    if "needs more GPUs" in done.stdout:
        pytest.skip("needs more GPUs")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("merged 524288.0" if kind == "none" else "failed:")
    assert kind == "none" or "CUDA_ERROR" in done.stdout
    assert float(done.stdout.split()[-2]) < 10
