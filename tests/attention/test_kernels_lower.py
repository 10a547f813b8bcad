"""Attention with kernels, lowered for one H200 and for two that are not there, with the collectives around them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from dcpjax.attention import AttentionOptions, Selection, attend, with_boxes
from dcpjax.batch import ForwardBatch
from dcpjax.cache import Pool, Record
from dcpjax.kernels import Kernels
from dcpjax.layout import CacheLayout
from dcpjax.mesh import ALL, MeshPlan

VALUE, ROPE, HEADS, TOPK, PAGE, PAGES, WIDTH = 512, 64, 64, 2048, 64, 40, 32
KERNELS = Kernels(sparse_mla="mosaic", merge="triton")


def plan_of(dcp: int) -> MeshPlan:
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    return MeshPlan(AbstractMesh((1, dcp), ALL, axis_types=(AxisType.Auto, AxisType.Auto), abstract_device=device))


@pytest.mark.parametrize(
    "dcp, backend, movement, merge, tokens, invariant",
    [
        (dcp, backend, movement, "triton", tokens, False)
        for dcp, backend, movement in ((1, "ag_rs", None), (2, "a2a", "queries"), (2, "ag_rs", "queries"), (2, "ag_rs", "rows"))
        for tokens in (1, 64)
    ]
    + [
        (2, "a2a", "queries", "mosaic", 1, False), (2, "a2a", "queries", "mosaic", 256, False),
        (2, "ag_rs", "queries", "mosaic", 1, False),
        # Neither the way of merging nor what is sent may depend on the number of tokens.
        (2, "a2a", None, "mosaic", 1, True), (2, "a2a", None, "mosaic", 256, True),
    ],
)  # fmt: skip
def test_attention_lowers_for_h200s(dcp, backend, movement, merge, tokens, invariant):
    plan = plan_of(dcp)
    layout = CacheLayout(PAGES, PAGE, dcp)
    shape = jax.ShapeDtypeStruct
    batch = ForwardBatch(
        tokens=shape((tokens,), jnp.int32),
        positions=shape((tokens,), jnp.int32),
        row_of=shape((tokens,), jnp.int32),
        slots=shape((tokens,), jnp.int32),
        write_slots=shape((tokens,), jnp.int32),
        pages=shape((tokens, WIDTH), jnp.int32),
    )
    selection = Selection(
        slots=shape((tokens, TOPK), jnp.int32),
        rows=shape((dcp, tokens, TOPK), jnp.int32),
        count=shape((dcp, tokens), jnp.int32),
    )
    call = functools.partial(
        attend, layer=3, value_width=VALUE, scale=0.1, plan=plan,
        options=AttentionOptions(backend, movement, kernels=dataclasses.replace(KERNELS, merge=merge, invariant=invariant)),
    )  # fmt: skip
    pool = Pool(shape((4, PAGES, PAGE, VALUE + ROPE), jnp.bfloat16), layout, Record(VALUE + ROPE, jnp.bfloat16))
    q = shape((tokens, HEADS, VALUE + ROPE), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(plan.mesh):

        def run(q, pool, selection, batch):
            batch = with_boxes(batch, HEADS, VALUE, q.dtype, pool, call.keywords["options"], plan)
            return call(q, pool, selection=selection, batch=batch)

        traced = jax.jit(run).trace(q, pool, selection, batch)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Many tokens whose output is in bfloat16 have Hopper's own kernel, all others the one in Triton; few are merged by the
    # second of two kernels, without any other movement than that of addresses.
    own = (tokens >= 64 or invariant) and (dcp == 1 or backend == "a2a")
    boxed = merge == "mosaic" and backend == "a2a" and tokens == 1 and not invariant
    assert text.count("mosaic_gpu_v2") == own + 2 * boxed
    assert own or "sparse_mla" in text
    assert ("merge_packed" in text) == (backend == "a2a" and not boxed)
    assert text.count('"stablehlo.all_to_all"') == (backend == "a2a" and not boxed)
