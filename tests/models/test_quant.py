"""Quantised arrays: values by hand, products, and how they lie on a mesh."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dcpjax.mesh import make_plan
from dcpjax.quant import QArray, dequantise, einsum, linear, plain, specs

# Every e2m1 number, in the order of its code.
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def fp8(shape, seed=0, block=(128, 128)):
    """A random FP8 stack, and the same in float64 by a loop over blocks."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    grid = [-(-n // b) for n, b in zip(shape[-2:], block)]
    scales = rng.uniform(0.5, 2, (*shape[:-2], *grid)).astype(np.float32)
    want = values.astype(np.float64)
    for i in range(grid[0]):
        for j in range(grid[1]):
            rows, columns = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            want[..., rows, columns] *= scales[..., i, j, None, None]
    return QArray(jnp.asarray(values), jnp.asarray(scales), block=block), want


def test_partial_blocks_have_scales_of_their_own():
    w, want = fp8((2, 200, 130))
    assert w.scales.shape == (2, 2, 2) and w.shape == (2, 200, 130)
    np.testing.assert_array_equal(dequantise(w, jnp.float32), want.astype(np.float32))


def test_packed_numbers_by_hand():
    """Byte j holds number 2j in its low half; 16 numbers share a scale, a matrix a factor."""
    codes = np.arange(16, dtype=np.uint8)
    packed = codes[0::2] | codes[1::2] << 4
    w = QArray(
        jnp.asarray(np.stack([np.tile(packed, 2), np.tile(packed[::-1], 2)])[None]),
        jnp.asarray(np.array([[[1, 2], [0.5, 448]]], ml_dtypes.float8_e4m3fn)),
        jnp.asarray([0.25], jnp.float32),
        (1, 16),
    )
    assert w.packed and w.shape == (1, 2, 32)
    back = np.array(E2M1).reshape(8, 2)[::-1].reshape(-1)
    rows = np.stack([[*E2M1, *E2M1], [*back, *back]])
    scales = np.array([[1] * 16 + [2] * 16, [0.5] * 16 + [448] * 16])
    np.testing.assert_array_equal(dequantise(w, jnp.float32)[0], rows * scales * 0.25)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_those_of_the_wide_weight(dtype):
    w, want = fp8((3, 40, 36), seed=1, block=(16, 8))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 36)), dtype)
    wide = jnp.asarray(want, jnp.float32).astype(dtype)
    got = einsum("td,eid->tei", x, w)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, einsum("td,eid->tei", x, wide))
    np.testing.assert_array_equal(linear(x, jax.tree.map(lambda a: a[1], w)), linear(x, wide[1]))
    assert plain({"a": w, "b": x}, dtype)["a"].shape == (3, 40, 36)
    assert plain({"a": w, "b": x}, dtype)["b"] is x


def test_specs_follow_the_arrays():
    plan = make_plan(4)
    stack = plan.spec(None, "width", None)
    w, _ = fp8((2, 256, 128))
    assert specs(jnp.zeros((2, 2)), stack) == stack
    assert specs(w, stack) == w.replace(values=stack, scales=stack)
    packed = w.replace(factor=jnp.ones(2))
    assert specs(packed, stack).factor == jax.sharding.PartitionSpec(None)
