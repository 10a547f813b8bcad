"""What crosses devices by sizes alone, against the collectives of traced steps; and the least time of a step."""

import collections
import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import build, footprint
from dcpjax.build import EngineConfig
from dcpjax.mesh import abstract_plan
from dcpjax.roofline import H200, expert_share, step_floor
from dcpjax.spec import Speculation
from dcpjax.step import StepShape
from dcpjax.traffic import crossings
from models.config import from_hf
from models.published import GLM_5_2
from models.stored import abstract, all_plain, published
from tests.attention import toy

GLM = from_hf(GLM_5_2)
ROWS = 4
# Sums that the partitioner adds, and the logits' gather, are in no trace; how often they come is counted elsewhere.
BY_THE_PARTITIONER = ("sum after attention", "sum of attention", "gather of logits")
KINDS = {"gather": "all_gather", "sum": "psum", "scatter": "reduce_scatter", "exchange": "all_to_all"}


def ready(cfg, **more):
    config = EngineConfig(
        max_num_seqs=ROWS, max_num_batched_tokens=64, block_size=8, num_blocks=17, dtype="float32", **more
    )
    plan = abstract_plan(
        config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_parallel, "cpu"
    )
    return build.resolve(cfg, config, plan=plan)


def traced(found) -> dict[str, tuple[int, float]]:
    """Collectives of a decode step and the bytes a device receives in them, by primitive, from its trace."""
    drafts = 0 if found.speculation is None else found.speculation.num_drafts
    # A table so wide that queries travel to the rows and not rows to the queries.
    shape = StepShape(ROWS * (drafts + 1), ROWS, 256, drafts, drafts)
    total: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])

    def walk(jaxpr, times):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name.removesuffix("_invariant")
            if name in KINDS.values():
                axes = eqn.params.get("axes", eqn.params.get("axis_name"))
                axes = axes if isinstance(axes, tuple) else (axes,)
                n = math.prod(dict(found.net.plan.mesh.shape)[axis] for axis in axes)
                into = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
                received = {
                    "psum": 2 * (n - 1) / n,
                    "all_gather": n - 1,
                    "reduce_scatter": (n - 1) / n,
                    "all_to_all": (n - 1) / n,
                }
                total[name][0] += times
                total[name][1] += times * into * received[name]
            for body in footprint.liveness._bodies(eqn):
                walk(body, times * eqn.params.get("length", 1))

    walk(footprint._trace(found, all_plain, shape).jaxpr, 1)
    return {name: tuple(value) for name, value in total.items()}


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize(
    "more",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 8, "decode_context_parallel_size": 4, "backend": "ag_rs"},
        {"decode_context_parallel_size": 4, "backend": "a2a", "drafts": 3},
        {"decode_context_parallel_size": 4, "backend": "psum", "drafts": 1, "draft_kv": "replicated"},
        {"decode_context_parallel_size": 2, "drafts": 2, "index_shards": 1},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "expert_parallel": True, "drafts": 0},
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_as_often_and_as_much_as_in_the_traced_step(more, share):
    more = dict(more)
    drafts = more.pop("drafts", None)
    spec = None if drafts is None else Speculation(drafts)
    found = ready(toy.config("FSF", "DMM", index_share_for_mtp_iteration=share), speculation=spec, **more)
    want: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for crossing in crossings(found, ROWS):
        if crossing.operation not in BY_THE_PARTITIONER:
            kind = want[KINDS[crossing.operation.split()[0] if crossing.operation != "sum of parts" else "sum"]]
            kind[0] += crossing.times
            kind[1] += crossing.times * crossing.nbytes
    got = traced(found)
    assert {name: n for name, (n, _) in got.items()} == {name: n for name, (n, _) in want.items()}
    for name, (_, nbytes) in want.items():
        assert got[name][1] == pytest.approx(nbytes), name


def test_nothing_crosses_on_one_device():
    assert crossings(ready(toy.config()), ROWS) == ()


# --- the least time of a step -------------------------------------------------------------------------------------------


def glm(quantisation: str | None = "fp8", kind: str = "fp8", **more):
    """GLM-5.2 on H200s, and the shapes of its weights; its records in `kind`."""
    config = EngineConfig(num_blocks=20_000, max_num_seqs=128, max_num_batched_tokens=2048, dtype="bfloat16", **more)
    plan = abstract_plan(config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_parallel)
    found = build.resolve(GLM, config, plan=plan)
    shards, draft_kv = found.shape.index_shards, config.draft_kv
    shape = build.capacity.cache_shape(GLM, plan, kind, shards, draft_kv)
    return dataclasses.replace(found, shape=shape), abstract(GLM, plan, jnp.bfloat16, published(quantisation, GLM))


@pytest.mark.parametrize(
    "quantisation, tokens, want",
    [("fp8", 1, 1.08), ("fp8", 6, 3.76), ("fp8", 16, 8.00), ("fp8", 128, 19.04), (None, 1, 2.10), (None, 6, 7.47),
     (None, 16, 15.96), (None, 128, 38.03)],
)  # fmt: skip
def test_weights_of_a_step_on_eight_devices(quantisation, tokens, want):
    """In milliseconds, against a sum of parameters by hand that deals every weight out evenly. One device here, so that none
    is held eight times; what is left is kv_b in bfloat16, and scales."""
    found, params = glm(quantisation)
    assert step_floor(found, params, tokens, 1).weights / 8 * 1e3 == pytest.approx(want, rel=0.035)


@pytest.mark.parametrize(
    "dcp, rows, want", [(1, 1, 0.022), (1, 16, 0.35), (1, 128, 2.79), (4, 16, 0.087), (8, 128, 0.36)]
)
def test_attention_of_a_step(dcp, rows, want):
    """Rows that were selected; at dcp 8 the products take longer than the bytes."""
    found, params = glm(tensor_parallel_size=8, decode_context_parallel_size=dcp)
    assert step_floor(found, params, rows, 1 << 17).attention * 1e3 == pytest.approx(want, rel=0.04)


@pytest.mark.parametrize(
    "dcp, rows, context, want", [(1, 1, 17, 0.076), (1, 16, 17, 1.2), (1, 1, 20, 0.61), (4, 16, 17, 0.30)]
)
def test_index_scan_of_a_step(dcp, rows, context, want):
    found, params = glm(tensor_parallel_size=8, decode_context_parallel_size=dcp)
    assert step_floor(found, params, rows, 1 << context).index * 1e3 == pytest.approx(want, rel=0.03)


def test_drafts_of_a_step():
    """A pass of the draft is about 65 µs, most of it the head; passes that reuse a selection scan no keys."""
    found, params = glm(tensor_parallel_size=8, speculation=Speculation(5))
    floor = step_floor(found, params, 1, 1)
    one = (floor.drafts - step_floor(*glm(tensor_parallel_size=8, speculation=Speculation(4)), 1, 1).drafts) * 1e6
    assert 55 < one < 120
    assert floor.total == pytest.approx(floor.weights + floor.attention + floor.index + floor.drafts)
    long = step_floor(found, params, 1, 1 << 20).drafts - step_floor(found, params, 1, 1 << 12).drafts
    assert long == pytest.approx(((1 << 20) - (1 << 12)) * 132 / H200.bandwidth)


def test_share_of_experts():
    """With whole experts on devices the busiest one decides: it reads a larger share of what it holds."""
    assert [round(256 * expert_share(n, 256, 8, 1)) for n in (1, 6, 16, 128)] == [8, 44, 102, 252]
    assert 2 / 32 < expert_share(1, 256, 8, 8) < 3.5 / 32
    assert expert_share(512, 256, 8, 8) == pytest.approx(1, abs=1e-3)
    draws = np.random.default_rng(1).random((2000, 256)).argpartition(7, axis=1)[:, :8] // 32
    want = np.mean([np.bincount(row, minlength=8).max() for row in draws])
    assert 32 * expert_share(1, 256, 8, 8) == pytest.approx(want, rel=0.05)
