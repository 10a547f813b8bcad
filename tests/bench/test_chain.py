"""Chained calls are all made: a compiler that left some out would make every kernel look fast."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.bench import (
    chain,
    kernels_experts,
    kernels_index,
    kernels_merge,
    kernels_mla,
    kernels_projection,
    kernels_topk,
)
from dcpjax.bench.chain import READ_CEILING, Case
from dcpjax.mesh import abstract_plan


class Counted:
    """A function that the compiler may leave out when its result is not needed, and that knows how often it ran."""

    def __init__(self):
        self.calls, self.numbers = 0, set()

    def run(self, number, x):
        self.calls += 1
        self.numbers.add(int(number))
        return x

    def __call__(self, number, x, *_):
        return jax.pure_callback(self.run, jax.ShapeDtypeStruct(x.shape, x.dtype), number, x)


def case(call, calls=5) -> Case:
    return Case("name", "arm", {"tokens": 3}, call, lambda: (jnp.ones(3), jnp.ones(2)), 21.2e6, 5.0, calls)


def test_every_call_of_a_chain_is_made():
    counted = Counted()
    (row,) = chain.measure([case(counted)])
    assert row["us"] > 0
    assert counted.calls == 5 * 6  # one run is not counted
    assert counted.numbers == set(range(5))


def test_what_calls_share_is_made_once_a_chain():
    shared = Counted()
    made = dataclasses.replace(case(lambda _, x, y: x + y), begin=lambda x, _: (x, shared(0, x)))
    list(chain.measure([made]))
    assert shared.calls == 6


def test_boxes_are_opened_in_the_program_that_is_measured(monkeypatch):
    monkeypatch.setattr(kernels_merge, "make_plan", abstract_plan)
    (boxed,) = kernels_merge.cases((16,), ("mosaic",))
    out = jax.ShapeDtypeStruct((2, 16, 64, 512), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((2, 16, 64), jnp.float32)
    with jax.sharding.use_abstract_mesh(abstract_plan(2, 2).mesh):
        text = jax.jit(boxed.chain).trace(out, lse).lower(lowering_platforms=("cuda",)).as_text()
    # The calls are one function.
    assert text.count("mosaic_gpu_v2") == 2
    assert text.count('"stablehlo.all_gather"') == 1
    assert text.count("call @merge") == boxed.calls


def test_every_layer_of_sparse_mla_is_computed(monkeypatch):
    counted = Counted()
    real = kernels_mla.sparse_mla

    def watched(q, pool, layer, *args, **choice):
        return counted(layer, real(q, pool, layer, *args, **choice)[0])

    monkeypatch.setattr(kernels_mla, "sparse_mla", watched)
    (got,) = chain.measure(kernels_mla.cases((1,), (16,), (512,), ("xla",), layers=3, num_rows=64))
    assert counted.calls == 3 * 6
    assert counted.numbers == {0, 1, 2}
    assert got["kernel"] == "sparse mla"
    assert (got["tokens"], got["heads"], got["count"], got["records"]) == (1, 16, 512, "bfloat16")
    # 512 rows of 1152 bytes at the ceiling, and two launches.
    assert got["predicted_us"] == pytest.approx(512 * 1152 / READ_CEILING * 1e6 + 6, abs=0.06)


def test_sparse_mla_has_the_arms_that_the_engine_would_take():
    found = kernels_mla.cases()
    arms = {(x.arm, *x.shape.values()) for x in found}
    assert len(arms) == len(found)
    for records in ("bfloat16", "fp8"):
        assert ("mosaic", 16, 64, 2048, records, False) in arms and ("triton", 16, 64, 2048, records, False) in arms
        for tokens in (1, 4, 16, 64, 128):
            assert sum((arm, tokens, 64, 2048, records, True) in arms for arm in ("triton", "mosaic")) == 1
    assert ("mosaic", 64, 16, 512, "fp8", False) in arms and ("mosaic", 64, 16, 512, "bfloat16", False) not in arms
    assert not any(x.shape["invariant"] for x in kernels_mla.cases(arms=("triton", "xla")))
    (fixed,) = (x for x in found if list(x.shape.values()) == [16, 64, 2048, "bfloat16", True])
    # Rows at the ceiling, and a launch for splits and one for merging them.
    assert fixed.predicted_us == pytest.approx(16 * 2048 * 1152 / READ_CEILING * 1e6 + 6)


def test_the_other_parts_run():
    """The XLA arms of small shapes, whose inputs are those of the tables."""
    found = [
        *kernels_index.cases(((1, 128),), (1,), ("xla",)),
        *kernels_topk.cases(((1, 4096),), ((1, 2),), ("xla",)),
        *kernels_merge.cases((1,), ("xla",)),
        *kernels_projection.cases((2,), ("xla", "bf16"), {"small": (32, 64)}, stack_bytes=4096),
    ]
    rows = list(chain.measure(found))
    assert [row["kernel"] for row in rows] == ["indexer", "topk", "topk merge", "lse merge", "projection", "projection"]
    # Values, one scale, and the tokens in and out.
    assert found[-2].nbytes == 32 * 64 + 4 + 2 * 96 * 2 and found[-1].nbytes == 2 * 32 * 64 + 2 * 96 * 2
    shapes = jax.eval_shape(kernels_experts.cases((4,), ("xla",))[0].inputs)
    assert [x.shape for x in shapes[:3]] == [(4, 6144), (4, 8), (4, 8)]


def test_a_row_tells_bandwidth_and_share():
    got = case(None).row(10.0)
    assert got == {
        "kernel": "name", "arm": "arm", "tokens": 3, "us": 10.0, "gb_per_s": 2120, "share": 0.5, "predicted_us": 5.0,
    }  # fmt: skip
    assert np.isclose(READ_CEILING, 4.24e12)
