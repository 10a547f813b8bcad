"""Routed experts of a few tokens: every implementation against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.experts import experts_ffn, fitting
from dcpjax.pallas_kernels.experts_triton import ExpertsConfig
from dcpjax.pallas_kernels.pairs import listed
from dcpjax.pallas_kernels.tiles import served
from dcpjax.quant import QArray, plain
from tests.kernels.base import BACKENDS, fresh, lower_for_h200, same_bits

# tokens, experts each, experts, inner, width, dtype, config
CASES = [
    (1, 2, 5, 16, 32, jnp.float32, None),
    (5, 3, 7, 32, 48, jnp.float32, ExpertsConfig(16, 16, 16)),
    (17, 2, 4, 48, 64, jnp.float32, ExpertsConfig(16, 32, 16)),
    (4, 1, 3, 32, 32, jnp.float32, None),
    (33, 4, 6, 32, 32, jnp.bfloat16, None),
    (40, 3, 5, 32, 48, jnp.float32, ExpertsConfig(16, 16, 16, rows=16)),
    (3, 2, 4, 64, 96, jnp.float32, ExpertsConfig(16, 16, 16, into_splits=3, out_splits=2)),
    (6, 2, 4, 32, 48, jnp.float32, ExpertsConfig(16, 16, 16, rows=1)),
]


def make(tokens, per_token, experts, inner, width, dtype):
    """Arguments; experts that no token chose hold NaN."""
    rng = fresh("experts", tokens, per_token, experts, inner, width)
    chosen = np.stack([rng.permutation(experts)[:per_token] for _ in range(tokens)]).astype(np.int32)
    shapes = ((experts, inner, width), (experts, inner, width), (experts, width, inner))
    stacks = [rng.normal(size=shape) / np.sqrt(shape[2]) for shape in shapes]
    for stack in stacks:
        stack[np.setdiff1d(np.arange(experts), chosen)] = np.nan
    x, weight = rng.normal(size=(tokens, width)), rng.random((tokens, per_token)).astype(np.float32)
    return jnp.asarray(x, dtype), chosen, weight, *(jnp.asarray(stack, dtype) for stack in stacks)


def oracle(x, chosen, weight, gate, up, down):
    x, gate, up, down = (np.asarray(a, np.float64) for a in (x, gate, up, down))
    out = np.zeros_like(x)
    for t, experts in enumerate(chosen):
        for e, share in zip(experts, weight[t], strict=True):
            a = gate[e] @ x[t]
            out[t] += share * (down[e] @ (a / (1 + np.exp(-a)) * (up[e] @ x[t])))
    return out


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}x{case[1]}of{case[2]}")
def test_equals_float64(case, backend):
    *sizes, config = case
    args = make(*sizes)
    call = jax.jit(experts_ffn, static_argnames=("config", "backend"))
    got = call(*args, config=config, backend=backend)
    assert got.dtype == sizes[-1] and got.shape == args[0].shape
    assert relative(got, oracle(*args)) < (1e-5 if sizes[-1] == jnp.float32 else 1e-2)
    same_bits(got, call(*args, config=config, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*CASES[1:3], CASES[5], CASES[7]], ids=["5", "17", "40", "alone"])
def test_experts_that_are_left_out_add_nothing(case, backend):
    """Even if theirs are all experts of a token; whatever the weight beside them is."""
    *sizes, config = case
    x, chosen, weight, *stacks = make(*sizes)
    out = fresh("out", *sizes).random(chosen.shape) < 0.5
    out[2] = True
    chosen = np.where(out, -1, chosen)
    weight = np.where(out, np.float32(np.nan), weight)
    want = oracle(x, chosen, np.where(out, 0, weight), *(jnp.nan_to_num(stack) for stack in stacks))
    call = jax.jit(experts_ffn, static_argnames=("config", "backend"))
    got = call(x, chosen, weight, *stacks, config=config, backend=backend)
    assert relative(got, want) < 1e-5 and not np.any(np.asarray(got)[2])
    got = call(x, chosen, weight, *(jnp.nan_to_num(stack) for stack in stacks))
    assert relative(got, want) < 1e-5 and not np.any(np.asarray(got)[2])


@pytest.mark.parametrize("rows", [1, 4])
def test_every_pair_is_in_a_tile_of_its_expert(rows):
    """Whatever the routing: even, all tokens with the same experts, some left out, nothing at all."""
    rng, num = fresh("listed", rows), 6
    even = np.stack([rng.permutation(num)[:3] for _ in range(11)])
    for chosen in (even, np.full_like(even, [4, 0, 2]), np.where(rng.random(even.shape) < 0.5, -1, even), 0 * even - 1):
        experts, pairs = (np.asarray(a) for a in listed(jnp.asarray(chosen, jnp.int32), num, rows))
        real, flat = pairs < chosen.size, chosen.reshape(-1)
        assert sorted(pairs[real]) == list(np.flatnonzero(flat >= 0))
        np.testing.assert_array_equal(flat[pairs[real]], np.broadcast_to(experts[:, None], pairs.shape)[real])
        # No expert is read in more tiles than it needs, and all of them stand in front.
        assert np.sum(experts >= 0) == sum(-(-np.sum(flat == e) // rows) for e in range(num))
        assert np.all(np.diff((experts >= 0).astype(int)) <= 0) and np.all(pairs[~real] < chosen.size + rows)


@pytest.mark.parametrize("case", CASES[:2], ids=["1", "5"])
def test_reference_equals_float64(case):
    args = make(*case[:-1])
    filled = (jnp.nan_to_num(a) for a in args[3:])  # the reference multiplies experts that nobody chose
    assert relative(experts_ffn(*args[:3], *filled), oracle(*args)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 100, 300, 700, 1100])
def test_large_on_the_device(tokens):
    args = make(tokens, 4, 16, 256, 512, jnp.bfloat16)
    got = jax.jit(experts_ffn, static_argnames="backend")(*args, backend="triton")
    assert relative(got, oracle(*args)) < 1e-2


@pytest.mark.parametrize("tokens", [1, 16, 64, 512, 2048])
@pytest.mark.parametrize("inner", [2048, 256])
def test_lowers_for_h200(tokens, inner):
    """256 is the inner width on one of eight devices."""
    stacks = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, inner, 6144), (8, inner, 6144), (8, 6144, inner))]
    x = jax.ShapeDtypeStruct((tokens, 6144), jnp.bfloat16)
    chosen, weight = (jax.ShapeDtypeStruct((tokens, 8), t) for t in (jnp.int32, jnp.float32))
    assert lower_for_h200(lambda *args: experts_ffn(*args, backend="triton"), x, chosen, weight, *stacks)


def test_other_sizes_are_refused():
    with pytest.raises(NotImplementedError, match="multiples of 16"):
        experts_ffn(*make(1, 1, 2, 24, 16, jnp.float32), backend="triton")


def quantised(packed, experts, out, into, block=None):
    """A stack and its scales; those of experts that are not to be read can be spoiled by the caller."""
    rng = fresh("quantised", packed, experts, out, into)
    shape, scale = (experts, out, into), into**-0.5
    if not packed:
        rows, columns = block or (128, 128)
        values = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
        scales = rng.uniform(0.5, 2, (experts, -(-out // rows), -(-into // columns))).astype(np.float32) * scale
        return QArray(jnp.asarray(values), jnp.asarray(scales), None, (rows, columns))
    columns = block or 16
    values = rng.integers(0, 256, (experts, out, into // 2), np.uint8)
    scales = rng.uniform(0.5, 2, (experts, out, into // columns)).astype(jnp.float8_e4m3fn)
    factor = (rng.uniform(0.2, 0.5, experts) * scale).astype(np.float32)
    return QArray(jnp.asarray(values), jnp.asarray(scales), jnp.asarray(factor), (1, columns))


# packed, tokens, inner, width, blocks of the stacks into and out of the hidden layer, dtype
QUANTISED = [
    (False, 5, 128, 256, (128, 128), (128, 128), jnp.float32),
    (False, 17, 48, 64, (16, 64), (32, 16), jnp.float32),
    (False, 1, 256, 192, None, None, jnp.bfloat16),
    (True, 5, 64, 128, None, None, jnp.float32),
    (True, 17, 32, 96, 8, 4, jnp.float32),
    (True, 1, 64, 128, None, None, jnp.bfloat16),
    (False, 70, 32, 64, None, None, jnp.float32),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", QUANTISED, ids=lambda case: f"{'nvfp4' if case[0] else 'fp8'}-{case[1]}x{case[2]}")
def test_quantised_stacks_equal_wide_ones(case, backend):
    packed, tokens, inner, width, into_block, out_block, dtype = case
    x, chosen, weight, *_ = make(tokens, 2, 4, inner, width, dtype)
    stacks = (
        quantised(packed, 4, inner, width, into_block),
        quantised(packed, 4, inner, width, into_block),
        quantised(packed, 4, width, inner, out_block),
    )
    call = jax.jit(experts_ffn, static_argnames="backend")
    got = call(x, chosen, weight, *stacks, backend=backend)
    want = oracle(x, chosen, weight, *plain(stacks, jnp.float32))
    assert got.dtype == dtype and relative(got, want) < (1e-5 if dtype == jnp.float32 else 1e-2)
    same_bits(got, call(x, chosen, weight, *stacks, backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 700, 1100])
@pytest.mark.parametrize("packed", [False, True], ids=["fp8", "nvfp4"])
def test_large_quantised_stacks_on_the_device(packed, tokens):
    """With the tiles that real sizes have."""
    x, chosen, weight, *_ = make(tokens, 4, 16, 256, 512, jnp.bfloat16)
    stacks = quantised(packed, 16, 256, 512), quantised(packed, 16, 256, 512), quantised(packed, 16, 512, 256)
    got = jax.jit(experts_ffn, static_argnames="backend")(x, chosen, weight, *stacks, backend="triton")
    assert relative(got, oracle(x, chosen, weight, *plain(stacks, jnp.float32))) < 1e-2


@pytest.mark.parametrize("backend", [*BACKENDS, "xla"])
@pytest.mark.parametrize("packed", [None, False, True], ids=["plain", "fp8", "nvfp4"])
def test_stacks_of_all_layers(backend, packed):
    """What one layer's stacks give; the other layers are not read."""
    x, chosen, weight, *wide = make(5, 2, 4, 32, 64, jnp.float32)
    one = tuple(wide) if packed is None else tuple(quantised(packed, 4, *s) for s in ((32, 64), (32, 64), (64, 32)))
    one = jax.tree.map(jnp.nan_to_num, one) if packed is None else one
    other = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan) if a.dtype == jnp.float32 else jnp.zeros_like(a), one)
    stacks = jax.tree.map(lambda a, b: jnp.stack([b, a, b]), one, other)
    call = jax.jit(experts_ffn, static_argnames="backend")
    want = call(x, chosen, weight, *one, backend=backend)
    same_bits(call(x, chosen, weight, *stacks, layer=jnp.int32(1), backend=backend), want)


def test_quantised_stacks_are_widened_for_the_reference():
    x, chosen, weight, *_ = make(5, 2, 4, 32, 64, jnp.float32)
    stacks = quantised(False, 4, 32, 64), quantised(True, 4, 32, 64), quantised(False, 4, 64, 32)
    same_bits(experts_ffn(x, chosen, weight, *stacks), experts_ffn(x, chosen, weight, *plain(stacks, jnp.float32)))


@pytest.mark.parametrize("packed", [False, True], ids=["fp8", "nvfp4"])
@pytest.mark.parametrize("tokens, inner", [(1, 2048), (16, 256), (64, 2048), (256, 256)])
def test_quantised_stacks_lower_for_h200(packed, tokens, inner):
    def shapes(out, into):
        width, columns = (into // 2, 16) if packed else (into, 128)
        rows = 1 if packed else 128
        scale = jnp.float8_e4m3fn if packed else jnp.float32
        return QArray(
            jax.ShapeDtypeStruct((8, out, width), jnp.uint8 if packed else jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((8, out // rows, into // columns), scale),
            jax.ShapeDtypeStruct((8,), jnp.float32) if packed else None,
            (rows, columns),
        )

    stacks = shapes(inner, 6144), shapes(inner, 6144), shapes(6144, inner)
    x = jax.ShapeDtypeStruct((tokens, 6144), jnp.bfloat16)
    chosen, weight = (jax.ShapeDtypeStruct((tokens, 8), t) for t in (jnp.int32, jnp.float32))
    assert lower_for_h200(lambda *args: experts_ffn(*args, backend="triton"), x, chosen, weight, *stacks)


def test_stacks_that_the_kernel_cannot_read():
    """Blocks that are cut too small; arrays of bytes whose offsets do not fit; and what serves them then."""
    small = quantised(False, 4, 32, 64, (8, 64))
    assert not served(small) and served(quantised(False, 4, 32, 64)) and served(jnp.zeros((4, 24, 8)))
    values = jax.ShapeDtypeStruct((256, 2048, 6144), jnp.float8_e4m3fn)  # 3 GiB
    scales = jax.ShapeDtypeStruct((256, 16, 48), jnp.float32)
    half = jax.ShapeDtypeStruct((128, 2048, 6144), values.dtype)
    assert not served(QArray(values, scales)) and served(QArray(half, scales))
    packed, bytes_too = (jax.ShapeDtypeStruct((38, 256, 6144, n), jnp.uint8) for n in (128, 64))  # 8 and 4 GiB less 5 %
    assert not served(QArray(packed, jax.ShapeDtypeStruct(bytes_too.shape, jnp.float8_e4m3fn), None, (1, 4)))
    assert not served(quantised(True, 4, 32, 48))
    assert fitting("triton", small, small, quantised(False, 4, 64, 32)) == "xla"
    assert fitting("triton", *(quantised(True, 4, 32, 64),) * 2, quantised(True, 4, 64, 32)) == "triton"
    with pytest.raises(NotImplementedError, match="widen them first"):
        experts_ffn(
            *make(1, 1, 4, 32, 64, jnp.float32)[:3], small, small, quantised(False, 4, 64, 32), backend="triton"
        )
