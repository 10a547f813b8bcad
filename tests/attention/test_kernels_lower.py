"""Attention with kernels, lowered for one H200 and for two that are not there, with the collectives around them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from dcpjax.attention import AttentionOptions, Selection, attend, with_boxes
from dcpjax.batch import ForwardBatch
from dcpjax.cache import Pool, Record
from dcpjax.kernels import Kernels
from dcpjax.layout import CacheLayout
from dcpjax.mesh import ALL, MeshPlan, make_plan
from dcpjax.pallas_kernels import lse_merge_mosaic
from dcpjax.pallas_kernels.boxes import BoxConfig, Boxes

VALUE, ROPE, HEADS, TOPK, PAGE, PAGES, WIDTH = 512, 64, 64, 2048, 64, 40, 32
KERNELS = Kernels(sparse_mla="mosaic", merge="triton")


def plan_of(dcp: int, tp: int = 1) -> MeshPlan:
    device = AbstractDevice("NVIDIA H200", 132, "cuda")
    return MeshPlan(AbstractMesh((tp, dcp), ALL, axis_types=(AxisType.Auto, AxisType.Auto), abstract_device=device))


def layers_of(plan: MeshPlan, tokens: int, options: AttentionOptions, count: int = 1):
    """A function of so many layers, one after the other, with the boxes of one step, and the shapes of its arguments."""
    layout = CacheLayout(PAGES, PAGE, plan.dcp)
    shape = jax.ShapeDtypeStruct
    numbers = shape((tokens,), jnp.int32)
    batch = ForwardBatch(numbers, numbers, numbers, numbers, numbers, shape((tokens, WIDTH), jnp.int32))
    selection = Selection(
        slots=shape((tokens, TOPK), jnp.int32),
        rows=shape((plan.dcp, tokens, TOPK), jnp.int32),
        count=shape((plan.dcp, tokens), jnp.int32),
    )
    pool = Pool(shape((4, PAGES, PAGE, VALUE + ROPE), jnp.bfloat16), layout, Record(VALUE + ROPE, jnp.bfloat16))
    q = shape((tokens, HEADS, VALUE + ROPE), jnp.bfloat16)

    def run(q, pool, selection, batch):
        batch = with_boxes(batch, HEADS, VALUE, q.dtype, pool, options, plan)

        def layer(q, number):
            out = attend(
                q, pool, layer=number, selection=selection, batch=batch, value_width=VALUE, scale=0.1, options=options,
                plan=plan,
            )  # fmt: skip
            return q + out[:, :, :1], out

        return jax.lax.scan(layer, q, jnp.arange(count)) if count > 1 else layer(q, 3)

    return run, (q, pool, selection, batch)


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
    kernels = dataclasses.replace(KERNELS, merge=merge, invariant=invariant)
    run, args = layers_of(plan, tokens, AttentionOptions(backend, movement, kernels=kernels))
    with jax.sharding.use_abstract_mesh(plan.mesh):
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    # Many tokens whose output is in bfloat16 have Hopper's own kernel, and few with whole lists; all others the one in Triton.
    # Few are merged by the second of two kernels, without any other movement than that of addresses.
    own = dcp == 1 or ((tokens >= 64 or invariant) and backend == "a2a")
    boxed = merge == "mosaic" and backend == "a2a" and tokens == 1 and not invariant
    assert text.count("mosaic_gpu_v2") == own + 2 * boxed
    assert own or "sparse_mla" in text
    assert ("merge_packed" in text) == (backend == "a2a" and not boxed)
    assert text.count('"stablehlo.all_to_all"') == (backend == "a2a" and not boxed)


BOXED = AttentionOptions("a2a", "queries", kernels=dataclasses.replace(KERNELS, merge="mosaic"))


def test_boxes_are_of_all_devices():
    """In two groups of two ranks: as what no two devices share they leave where they are made, and enter where they are used."""
    plan = plan_of(dcp=2, tp=2)
    run, args = layers_of(plan, 2, BOXED, count=3)
    with jax.sharding.use_abstract_mesh(plan.mesh):
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    made = re.search(r"manual_computation\(\) in_shardings=\[\] out_shardings=\[(.*?)\] manual_axes", text).group(1)
    assert re.findall(r"<@mesh, \[(.*?)(?:, \{\})*\]>", made) == ['{"tp", "dcp"}'] * 5
    assert f", {made}] out_shardings=" in text
    assert text.count("mosaic_gpu_v2") == 2
    # Addresses once, heads in every layer, both among the ranks of a group.
    gathers = re.findall(r'"stablehlo.all_gather".*?axes = \[(.*?)\]', text)
    assert gathers == ['#stablehlo.axis_ref<name = "dcp">'] * 2


def test_boxes_cross_no_devices(monkeypatch):
    """The same, compiled for devices of this machine with something plain instead of the kernels."""

    def open_boxes(tokens, heads, width, dtype, ranks, rank):
        cut = BoxConfig(blocks=2).cut(tokens, heads, ranks)
        shape = 2, ranks, cut.blocks, cut.step * cut.trips
        own = jnp.int32(rank)
        return Boxes(
            jnp.full((*shape, width), own.astype(dtype)), jnp.full(shape, own.astype(jnp.float32)),
            jnp.full((ranks + 1, cut.blocks), own), own[None], jnp.full((1, 3, 2), own),
        )  # fmt: skip

    def merge_boxed(out, lse, boxes):
        heads = out.shape[1] // boxes.parts.shape[1]
        found = sum(jnp.sum(x).astype(jnp.float32) for x in jax.tree.leaves(boxes))
        return out[:, :heads].astype(jnp.float32) + jnp.sum(lse) + found

    monkeypatch.setattr(lse_merge_mosaic, "open_boxes", open_boxes)
    monkeypatch.setattr(lse_merge_mosaic, "merge_boxed", merge_boxed)
    kernels = dataclasses.replace(BOXED.kernels, sparse_mla="xla")
    run, args = layers_of(make_plan(4, 2), 2, dataclasses.replace(BOXED, kernels=kernels), count=3)
    text = jax.jit(run).lower(*args).compile().as_text()
    crossings = re.findall(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", text)
    assert crossings == ["all-gather"] * 2
