"""Attention with kernels, lowered for one H200 and for two that are not there, with the collectives around them."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from dcpjax.attention import AttentionOptions, Selection, attend
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


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize(
    "dcp, backend, movement", [(1, "ag_rs", None), (2, "a2a", "queries"), (2, "ag_rs", "queries"), (2, "ag_rs", "rows")]
)
def test_attention_lowers_for_h200s(dcp, backend, movement, tokens):
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
        options=AttentionOptions(backend, movement, kernels=KERNELS),
    )  # fmt: skip
    pool = Pool(shape((4, PAGES, PAGE, VALUE + ROPE), jnp.bfloat16), layout, Record(VALUE + ROPE, jnp.bfloat16))
    q = shape((tokens, HEADS, VALUE + ROPE), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(plan.mesh):
        traced = jax.jit(lambda q, pool, selection, batch: call(q, pool, selection=selection, batch=batch)).trace(
            q, pool, selection, batch
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Many tokens whose output is in bfloat16 have Hopper's own kernel, all others the one in Triton.
    own = tokens == 64 and (dcp == 1 or backend == "a2a")
    assert text.count("mosaic_gpu_v2") == own
    assert own or "sparse_mla" in text
    assert ("merge_packed" in text) == (backend == "a2a")
    assert text.count('"stablehlo.all_to_all"') == (backend == "a2a")
