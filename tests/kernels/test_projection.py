"""Products with quantised dense matrices: the kernel against float64, at partial blocks, odd sizes, one row and many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.projection import MOST_ROWS, fitting, project
from dcpjax.pallas_kernels.projection_triton import ProjectionConfig
from dcpjax.quant import LayerOf, QArray, dequantise, linear
from tests.kernels.base import BACKENDS, fresh, lower_for_h200, same_bits


def make(packed, out, into, block, layers=1):
    """A stack `[layers, out, in]`; the last blocks of an axis may be partial."""
    rng, lead = fresh("projection", packed, out, into), (layers, out)
    if packed:
        values = rng.integers(0, 256, (*lead, into // 2), np.uint8)
        scales = rng.uniform(0.5, 2, (*lead, into // block[1])).astype(jnp.float8_e4m3fn)
        return QArray(*map(jnp.asarray, (values, scales, rng.random(layers, np.float32))), block)
    values = rng.normal(size=(*lead, into)).astype(jnp.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (layers, -(-out // block[0]), -(-into // block[1]))).astype(np.float32)
    return QArray(jnp.asarray(values), jnp.asarray(scales), None, block)


def tokens_of(tokens, into, dtype):
    return jnp.asarray(fresh("tokens", tokens, into).normal(size=(tokens, into)), dtype)


def error(got, x, w):
    want = np.asarray(x, np.float64) @ np.asarray(dequantise(w, jnp.float32), np.float64).T
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


# packed, tokens, out, in, block, dtype, config
CASES = [
    (False, 1, 192, 256, (128, 128), jnp.float32, None),  # half a block of rows at the edge
    (False, 64, 64, 320, (128, 128), jnp.float32, None),  # half a block of columns
    (False, 5, 48, 80, (16, 80), jnp.float32, None),  # blocks as a mesh cuts them
    (False, 17, 80, 256, (128, 64), jnp.bfloat16, ProjectionConfig(16, 32, 2)),
    (False, 33, 576, 128, (128, 128), jnp.bfloat16, None),
    (True, 3, 48, 96, (1, 16), jnp.float32, ProjectionConfig(16, 32, 3)),
    (True, 64, 32, 64, (1, 16), jnp.bfloat16, None),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{'nvfp4' if case[0] else 'fp8'}-{case[1]}of{case[2]}x{case[3]}"
)
def test_equals_float64(case, backend):
    packed, tokens, out, into, block, dtype, config = case
    x, w = tokens_of(tokens, into, dtype), jax.tree.map(lambda a: a[0], make(packed, out, into, block))
    call = jax.jit(project, static_argnames=("config", "backend"))
    got = call(x, w, config=config, backend=backend)
    assert got.shape == (tokens, out) and got.dtype == dtype
    assert error(got, x, w) < (1e-6 if dtype == jnp.float32 else 4e-3)
    same_bits(got, call(x, w, config=config, backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("out, into", [(2048, 6144), (576, 6144), (6144, 256)])
@pytest.mark.parametrize("packed", [False, True], ids=["fp8", "nvfp4"])
def test_large_on_the_device(packed, out, into, tokens):
    """With the tiles that real sizes have."""
    x = tokens_of(tokens, into, jnp.bfloat16)
    w = jax.tree.map(lambda a: a[0], make(packed, out, into, (1, 16) if packed else (128, 128)))
    assert error(jax.jit(project, static_argnames="backend")(x, w, backend="triton"), x, w) < 4e-3


@pytest.mark.parametrize("backend", [*BACKENDS, "xla"])
@pytest.mark.parametrize("packed", [False, True], ids=["fp8", "nvfp4"])
def test_a_layer_of_a_stack(backend, packed):
    """The same bits as the matrix by itself; the other layers are not read."""
    stack, x = make(packed, 32, 64, (1, 16) if packed else (128, 128), 3), tokens_of(4, 64, jnp.float32)
    only = jnp.arange(3) == 1
    stack = jax.tree.map(
        lambda a: jnp.where(only.reshape(-1, *(1,) * (a.ndim - 1)), a, jnp.nan) if a.dtype == jnp.float32 else a, stack
    )
    call = jax.jit(project, static_argnames="backend")
    got = call(x, LayerOf(stack, jnp.int32(1)), backend=backend)
    same_bits(got, call(x, jax.tree.map(lambda a: a[1], stack), backend=backend))
    assert error(got, x, LayerOf(stack, 1)) < 1e-6


def test_the_choice():
    """The kernel takes few tokens and quantised matrices of its sizes; the rest is what it was without it, bit for bit."""
    w = jax.tree.map(lambda a: a[0], make(False, 64, 64, (128, 128)))
    odd = jax.tree.map(lambda a: a[0], make(False, 100, 72, (128, 128)))
    plain, x = dequantise(w, jnp.bfloat16), tokens_of(3, 72, jnp.float32)
    assert fitting("triton", 1, w) == fitting("triton", MOST_ROWS, w) == "triton"
    assert fitting("triton", 1, LayerOf(make(False, 64, 64, (128, 128), 2), 0)) == "triton"
    for tokens, matrix in ((MOST_ROWS + 1, w), (1, plain), (1, odd)):
        assert fitting("triton", tokens, matrix) == "xla"
    assert fitting("xla", 1, w) == "xla"
    same_bits(project(x, odd, backend=fitting("triton", 3, odd)), linear(x, odd))
    with pytest.raises(NotImplementedError, match="use backend xla"):
        project(x, odd, backend="triton")
    with pytest.raises(NotImplementedError, match="use backend xla"):
        project(tokens_of(3, 64, jnp.bfloat16), plain, backend="triton")
    with pytest.raises(NotImplementedError, match="64 × 32 crosses blocks of"):
        narrow = jax.tree.map(lambda a: a[0], make(False, 64, 64, (32, 32)))
        project(tokens_of(3, 64, jnp.float32), narrow, config=ProjectionConfig(64, 32), backend="interpret")


def test_the_config_gives_every_multiprocessor_work():
    """Where the matrix has enough for them: 132 of an H200; and never splits what cannot be split evenly."""
    for out, into in ((2048, 6144), (16384, 2048), (576, 6144), (6144, 16384), (12288, 6144), (256, 6144), (6144, 256)):
        w = QArray(jax.ShapeDtypeStruct((out, into), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((1, 1), jnp.float32))
        config = ProjectionConfig.choose(1, w)
        assert out % config.out == 0 and into % (config.depth * config.splits) == 0
        assert out // config.out * config.splits >= 132 or config.splits in (2, 16)


@pytest.mark.parametrize("packed", [False, True], ids=["fp8", "nvfp4"])
@pytest.mark.parametrize("tokens, out, into", [(1, 2048, 6144), (16, 576, 6144), (64, 6144, 2048)])
def test_lowers_for_h200(packed, tokens, out, into):
    columns = into // 2 if packed else into
    blocks = (out, into // 16) if packed else (-(-out // 128), into // 128)
    stack = QArray(
        jax.ShapeDtypeStruct((8, out, columns), jnp.uint8 if packed else jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((8, *blocks), jnp.float8_e4m3fn if packed else jnp.float32),
        jax.ShapeDtypeStruct((8,), jnp.float32) if packed else None,
        (1, 16) if packed else (128, 128),
    )
    x = jax.ShapeDtypeStruct((tokens, into), jnp.bfloat16)
    text = lower_for_h200(lambda x, w, i: project(x, LayerOf(w, i), backend="triton"), x, stack, jnp.int32(3))
    # Nothing makes a matrix by itself, as it is or widened.
    assert "projection" in text and f"tensor<{out}x{into}x" not in text and "dynamic_slice" not in text
