"""Routed experts on meshes: whole ones on a device each, or a part of each on every device, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax import moe
from dcpjax.mesh import MeshPlan, make_plan
from models.params import declare, pad_to
from tests.attention import toy

# Three devices do not divide the experts, nor five and eight; eight have more places than there are experts.
MESHES = [(1, 1), (3, 1), (4, 2), (5, 1), (8, 4)]
TOKENS, PER_TOKEN = 7, 3
CONFIG = toy.config("F", "M", n_routed_experts=6, num_experts_per_tok=PER_TOKEN, moe_intermediate_size=48)


@functools.cache
def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, their experts (the first two tokens choose the same), and the weights of these."""
    rng = np.random.default_rng(3)
    chosen = np.stack([rng.permutation(CONFIG.moe.num_experts)[:PER_TOKEN] for _ in range(TOKENS)]).astype(np.int32)
    chosen[1] = chosen[0]
    x = rng.normal(size=(TOKENS, CONFIG.hidden_size)).astype(np.float32)
    return x, chosen, rng.random((TOKENS, PER_TOKEN), np.float32)


@functools.cache
def oracle() -> np.ndarray:
    x, chosen, weight = inputs()
    w = jax.tree.map(lambda a: np.asarray(a[0], np.float64), toy.params(CONFIG).layers.moe)

    def swiglu(x, gate, up, down):
        a = gate @ x
        return down @ (a / (1 + np.exp(-a)) * (up @ x))

    out = np.stack([swiglu(row, w.shared_gate, w.shared_up, w.shared_down) for row in x])
    for t, experts in enumerate(chosen):
        for e, share in zip(experts, weight[t], strict=True):
            out[t] += share * swiglu(x[t].astype(np.float64), w.gate[e], w.up[e], w.down[e])
    return out


def program(plan: MeshPlan, backend: str):
    w = pad_to(toy.params(CONFIG), CONFIG, plan).layers.moe
    stacks = w.gate, w.up, w.down, w.shared_gate[0], w.shared_up[0], w.shared_down[0]
    return jax.jit(functools.partial(moe.moe_ffn, plan=plan, backend=backend)), (*inputs(), *stacks)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_equals_float64(mesh, whole_experts):
    call, args = program(make_plan(*mesh, whole_experts), "xla")
    np.testing.assert_allclose(call(*args), oracle(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mesh", [(3, 1), (8, 4)], ids=str)
def test_whole_experts_by_the_kernel(mesh):
    """As on a GPU: the kernel is told of each token's own experts alone."""
    call, args = program(make_plan(*mesh, expert_parallel=True), "interpret")
    np.testing.assert_allclose(call(*args), oracle(), rtol=1e-4, atol=1e-5)


def test_a_device_holds_whole_experts_or_a_part_of_each():
    """Padding too: eight devices, six experts of 48 values."""
    for whole, places, width, part in ((True, 8, 48, (1, 1, 48, 32)), (False, 6, 48, (1, 6, 6, 32))):
        plan = make_plan(8, 4, whole)
        gate = pad_to(toy.params(CONFIG), CONFIG, plan).layers.moe.gate
        assert gate.shape == (1, places, width, 32) and gate.sharding.shard_shape(gate.shape) == part
        assert not np.any(np.asarray(gate)[:, CONFIG.moe.num_experts :])
        assert declare(CONFIG, plan.pad).layers.moe.router.full_shape == (1, 6, 32)


def test_numbers_on_other_devices_are_left_out():
    plan = make_plan(4, 2, True)
    experts = jnp.array([[0, 1, 2], [5, 3, 4]])
    spec = plan.spec("experts")
    seen = plan.per_device(lambda e: moe.own_experts(e, 2)[None], (plan.spec(),), spec)(experts)
    want = [[[0, 1, -1], [-1, -1, -1]], [[-1, -1, 0], [-1, 1, -1]], [[-1, -1, -1], [1, -1, 0]], [[-1] * 3] * 2]
    np.testing.assert_array_equal(seen, want)
