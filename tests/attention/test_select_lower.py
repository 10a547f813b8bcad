"""Selection and experts with kernels, lowered for one H200 and for two that are not there."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from dcpjax.attention import select
from dcpjax.batch import ForwardBatch
from dcpjax.cache import Pool, Record
from dcpjax.kernels import Kernels
from dcpjax.layout import CacheLayout
from dcpjax.mesh import ALL, MeshPlan
from dcpjax.moe import moe_ffn

HEADS, DIM, TOPK, PAGE, PAGES, TABLE = 32, 128, 2048, 64, 90, 80


def plan_of(dcp: int) -> MeshPlan:
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    return MeshPlan(AbstractMesh((1, dcp), ALL, axis_types=(AxisType.Auto, AxisType.Auto), abstract_device=device))


def lowered(function, plan, *args) -> str:
    with jax.sharding.use_abstract_mesh(plan.mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "rows, tokens, table, scan",
    [(1, 1, TABLE, "indexer_scores"), (16, 64, 256, "mosaic_gpu"), (1, 256, TABLE, "indexer_scores")],
)
@pytest.mark.parametrize("dcp", [1, 2])
def test_selection_lowers_for_h200s(dcp, rows, tokens, table, scan):
    plan, shape = plan_of(dcp), jax.ShapeDtypeStruct
    layout = CacheLayout(PAGES, PAGE, dcp)
    batch = ForwardBatch(**{name: shape((tokens,), jnp.int32) for name in ("tokens", "positions", "slots")},
        write_slots=shape((tokens,), jnp.int32), row_of=shape((tokens,), jnp.int32), pages=shape((rows, table), jnp.int32),
    )  # fmt: skip
    index = Pool(shape((2, PAGES, PAGE, DIM), jnp.bfloat16), layout, Record(DIM, jnp.bfloat16))
    latent = Pool(shape((4, PAGES, PAGE, 576), jnp.bfloat16), layout, Record(576, jnp.bfloat16))
    q, weight = shape((tokens, HEADS, DIM), jnp.bfloat16), shape((tokens, HEADS), jnp.float32)
    kernels = Kernels.for_platform("cuda", jnp.bfloat16, 512, 64, DIM, hopper=True)
    call = functools.partial(select, topk=TOPK, first_slot=1, plan=plan, kernels=kernels)
    text = lowered(lambda q, w, i, n, b: call(q, w, i, 1, n, b), plan, q, weight, index, latent, batch)
    assert scan in text and "topk_finish" in text
    assert text.count("all_gather") >= (dcp > 1)


@pytest.mark.parametrize("tokens", [4, 512])
@pytest.mark.parametrize("devices", [1, 2])
def test_experts_lower_for_h200s(devices, tokens):
    plan, shape = plan_of(devices), jax.ShapeDtypeStruct
    experts, inner, width, bf16 = 8, 512, 1024, jnp.bfloat16
    stacks = [
        shape((3, experts, inner, width), bf16),
        shape((3, experts, inner, width), bf16),
        shape((3, experts, width, inner), bf16),
    ]
    shared = [shape((inner, width), bf16), shape((inner, width), bf16), shape((width, inner), bf16)]
    chosen = shape((tokens, 4), jnp.int32), shape((tokens, 4), jnp.float32)
    call = functools.partial(moe_ffn, plan=plan, backend="triton", layer=1)
    assert "experts_into" in lowered(call, plan, shape((tokens, width), bf16), *chosen, *stacks, *shared)
