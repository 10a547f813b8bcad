"""Quantised dense matrices on meshes, by the kernel on each device's part; and a layer that reads them as they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.mesh import make_plan
from dcpjax.moe import dense_ffn
from dcpjax.projections import projected
from dcpjax.quant import LayerOf, QArray, dequantise, specs
from tests.attention.test_select_lower import lowered, plan_of

TOKENS, SIZE = 5, 64


def stack(out: int, into: int, seed: int) -> QArray:
    """Of two layers, in blocks that a mesh of up to four devices does not cut."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(2, out, into)).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (2, out // 16, into // 16)).astype(np.float32) / 8
    return QArray(jnp.asarray(values), jnp.asarray(scales), None, (16, 16))


@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)], ids=str)
@pytest.mark.parametrize("out, into", [(None, None), ("heads", None), (None, "heads")])
def test_equals_float64(mesh, out, into):
    plan, w = make_plan(*mesh), LayerOf(stack(SIZE, SIZE, 1), 1)
    x = np.random.default_rng(0).normal(size=(TOKENS, SIZE)).astype(np.float32)
    placed = jax.tree.map(
        lambda a, spec: jax.device_put(a, jax.sharding.NamedSharding(plan.mesh, spec)),
        w,
        specs(w, plan.spec(out, into)),
    )
    got = jax.jit(lambda x, w: projected(x, w, plan, "interpret", out, into))(x, placed)
    assert got.sharding.is_equivalent_to(plan.sharding(None, out), 2)
    np.testing.assert_allclose(got, x @ np.asarray(dequantise(w, jnp.float32)).T, rtol=1e-4, atol=1e-5)


def test_a_dense_layer_by_the_kernel():
    plan, weights = make_plan(4, 2), [LayerOf(stack(SIZE, SIZE, seed), 0) for seed in range(3)]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(TOKENS, SIZE)), jnp.float32)
    want = jax.jit(functools.partial(dense_ffn, plan=make_plan(1)))(x, *weights)
    got = jax.jit(functools.partial(dense_ffn, plan=plan, backend="interpret"))(x, *weights)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_dense_layer_lowers_for_h200s(devices):
    """Three products that read the stacks where they lie: no layer is cut out, none is widened."""
    plan, shape = plan_of(devices), jax.ShapeDtypeStruct

    def weight(out, into):
        values, scales = shape((3, out, into), jnp.float8_e4m3fn), shape((3, out // 128, into // 128), jnp.float32)
        return LayerOf(QArray(values, scales), shape((), jnp.int32))

    weights = weight(512, 1024), weight(512, 1024), weight(1024, 512)
    few, many = (
        lowered(
            functools.partial(dense_ffn, plan=plan, backend="triton"), plan, shape((n, 1024), jnp.bfloat16), *weights
        )
        for n in (4, 65)
    )
    assert few.count('name = "projection"') == 3 and "dynamic_slice" not in few
    assert "projection" not in many and "dynamic_slice" in many
