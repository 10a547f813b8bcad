"""Routed experts of a few tokens: every implementation against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.experts import MOST_TOKENS, experts_ffn
from dcpjax.pallas_kernels.experts_triton import ExpertsConfig
from dcpjax.quant import QArray, plain
from tests.kernels.base import BACKENDS, fresh, lower_for_h200, same_bits

# tokens, experts each, experts, inner, width, dtype, config
CASES = [
    (1, 2, 5, 16, 32, jnp.float32, None),
    (5, 3, 7, 32, 48, jnp.float32, ExpertsConfig(16, 16, 16)),
    (17, 2, 4, 48, 64, jnp.float32, ExpertsConfig(16, 32, 16)),
    (4, 1, 3, 32, 32, jnp.float32, None),
    (33, 4, 6, 32, 32, jnp.bfloat16, None),
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
@pytest.mark.parametrize("case", CASES[1:3], ids=["5", "17"])
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


@pytest.mark.parametrize("case", CASES[:2], ids=["1", "5"])
def test_reference_equals_float64(case):
    args = make(*case[:-1])
    filled = (jnp.nan_to_num(a) for a in args[3:])  # the reference multiplies experts that nobody chose
    assert relative(experts_ffn(*args[:3], *filled), oracle(*args)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("backend, tokens", [("triton", 1), ("triton", 16), ("triton", 64), ("mosaic", 100)])
def test_large_on_the_device(backend, tokens):
    args = make(tokens, 4, 16, 256, 512, jnp.bfloat16)
    stacks = args[3:] if backend == "triton" else [jnp.nan_to_num(a) for a in args[3:]]
    got = jax.jit(experts_ffn, static_argnames="backend")(*args[:3], *stacks, backend=backend)
    assert relative(got, oracle(*args)) < 1e-2


@pytest.mark.parametrize("backend, tokens", [("triton", 1), ("triton", 16), ("triton", 64), ("mosaic", 256)])
@pytest.mark.parametrize("inner", [2048, 256])
def test_lowers_for_h200(backend, tokens, inner):
    """256 is the inner width on one of eight devices."""
    stacks = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, inner, 6144), (8, inner, 6144), (8, 6144, inner))]
    x = jax.ShapeDtypeStruct((tokens, 6144), jnp.bfloat16)
    chosen, weight = (jax.ShapeDtypeStruct((tokens, 8), t) for t in (jnp.int32, jnp.float32))
    assert lower_for_h200(lambda *args: experts_ffn(*args, backend=backend), x, chosen, weight, *stacks)


def test_other_sizes_are_refused():
    with pytest.raises(NotImplementedError, match=f"at most {MOST_TOKENS}"):
        experts_ffn(*make(MOST_TOKENS + 1, 1, 2, 16, 16, jnp.float32), backend="triton")
    with pytest.raises(NotImplementedError, match="multiples of 16"):
        experts_ffn(*make(1, 1, 2, 24, 16, jnp.float32), backend="triton")
    with pytest.raises(NotImplementedError, match="128 × 64"):
        experts_ffn(*make(1, 1, 2, 16, 16, jnp.float32), backend="mosaic")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True], ids=["fp8", "nvfp4"])
def test_quantised_stacks_are_widened(backend, packed):
    """The same bits as with the wide stacks."""
    x, chosen, weight, *_ = make(5, 2, 4, 32, 64, jnp.float32)
    rng = np.random.default_rng(3)

    def stack(out, into):
        if not packed:
            values = rng.normal(size=(4, out, into)).astype(jnp.float8_e4m3fn)
            return QArray(jnp.asarray(values), rng.random((4, out // 16, into // 32), np.float32), None, (16, 32))
        values = rng.integers(0, 256, (4, out, into // 2), np.uint8)
        scales = rng.random((4, out, into // 16)).astype(jnp.float8_e4m3fn)
        return QArray(jnp.asarray(values), jnp.asarray(scales), rng.random(4, np.float32), (1, 16))

    stacks = stack(32, 64), stack(32, 64), stack(64, 32)
    call = jax.jit(experts_ffn, static_argnames="backend")
    same_bits(
        call(x, chosen, weight, *stacks, backend=backend),
        call(x, chosen, weight, *plain(stacks, jnp.float32), backend=backend),
    )
