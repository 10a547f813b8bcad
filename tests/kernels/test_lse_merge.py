"""The LSE merge as a kernel: against the reference, alone and behind one all-to-all on a mesh of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.collectives import merge_ranks
from dcpjax.mesh import make_plan
from dcpjax.pallas_kernels.lse_merge import MergeConfig, merge_packed, merge_parts, pack_parts
from dcpjax.pallas_kernels.lse_merge_triton import merge_splits
from tests.kernels.base import BACKENDS, fresh, lower_for_h200, same_bits

CONFIGS = {"small": (2, 16, 1), "rows": (1, 32, 2), "wide": (4, 32, 4)}
WIDTH = 32


def parts(parts, tokens, heads, dtype, width=WIDTH):
    """Outputs `[N, T, H, L]` and LSE `[N, T, H]`; some parts are empty and hold NaN, and so are all parts of token 0."""
    rng = fresh("parts", parts, tokens, heads, dtype)
    out = rng.normal(size=(parts, tokens, heads, width)).astype(np.float32)
    lse = (rng.normal(size=(parts, tokens, heads)) * 4).astype(np.float32)
    empty = rng.random(lse.shape) < 0.3
    empty[:, 0] = True
    lse[empty] = rng.choice([-np.inf, np.inf, np.nan], empty.sum())
    out[empty] = np.nan
    return jnp.asarray(out, dtype), jnp.asarray(lse)


def config_of(name, backend):
    rows, width, warps = CONFIGS[name]
    return MergeConfig(rows, width, warps, interpret=backend == "interpret")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "number, tokens, heads, dtype", [(1, 3, 5, "float32"), (3, 5, 3, "bfloat16"), (8, 1, 1, "float32")]
)
def test_splits_equal_the_reference(number, tokens, heads, dtype, config, backend):
    out, lse = parts(number, tokens, heads, dtype)
    want = merge_parts(out, lse)
    call = jax.jit(functools.partial(merge_splits, out_dtype=jnp.float32, config=config_of(config, backend)))
    got = call(out.swapaxes(0, 1), lse.swapaxes(0, 1))
    np.testing.assert_allclose(got[0], want[0], atol=2e-6)
    np.testing.assert_allclose(got[1], want[1], atol=2e-6)
    np.testing.assert_array_equal(got[0][0], np.zeros((heads, WIDTH)))
    np.testing.assert_array_equal(got[1][0], np.full(heads, -np.inf))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number, tokens, heads", [(2, 3, 5), (4, 5, 1)])
def test_packed_parts_equal_the_reference(number, tokens, heads, dtype, backend):
    out, lse = parts(number, tokens, heads, dtype)
    packed = pack_parts(out.reshape(-1, heads, WIDTH), lse.reshape(-1, heads)).reshape(number, tokens, heads, -1)
    want = merge_packed(packed, WIDTH, out.dtype)
    same_bits(want, merge_parts(out, lse)[0])
    got = jax.jit(lambda x: merge_packed(x, WIDTH, out.dtype, backend=backend))(packed)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=2e-6)
    same_bits(merge_packed(packed, WIDTH, out.dtype, backend=backend), got)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_all_to_all_on_a_mesh(ranks, dtype):
    """Heads are dealt out, and each rank's are the merge of what all ranks had of them."""
    out, lse = parts(ranks, 3, 8, dtype)
    plan = make_plan(ranks, ranks)
    deal = plan.spec("ranks")

    def merged(kernel):
        body = plan.per_device(
            lambda out, lse: merge_ranks(out[0], lse[0], "a2a", kernel), (deal, deal), plan.spec(None, "heads", None)
        )
        return jax.jit(body)(out, lse)

    want = merge_parts(out, lse)[0]
    for kernel in ("xla", "interpret"):
        got = merged(kernel)
        assert got.sharding.shard_shape(got.shape) == (3, 8 // ranks, WIDTH)
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("dtype, words", [("bfloat16", 2), ("float32", 1)])
@pytest.mark.parametrize("tokens", [1, 16, 64, 128])
def test_lowers_for_an_h200(tokens, dtype, words):
    word = jnp.uint16 if dtype == "bfloat16" else jnp.uint32
    packed = jax.ShapeDtypeStruct((2, tokens, 32, 512 + words), word)
    call = functools.partial(merge_packed, width=512, dtype=jnp.dtype(dtype), out_dtype=jnp.bfloat16, backend="triton")
    assert "merge_packed" in lower_for_h200(call, packed)


def test_widths_that_are_not_here():
    packed = pack_parts(jnp.zeros((2, 3, 48), jnp.bfloat16), jnp.zeros((2, 3)))
    with pytest.raises(NotImplementedError, match="width 48 in slices of 48: use a power of two"):
        merge_packed(packed[None], 48, jnp.bfloat16, backend="triton")
