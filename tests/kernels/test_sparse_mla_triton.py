"""Sparse MLA in Triton: against float64, with NaN in all that must not be read, empty rows, and bits that repeat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.records import pack_rows, packed_words, unpack_rows
from dcpjax.pallas_kernels.sparse_mla import SparseMLAConfig, sparse_mla
from tests.kernels.base import BACKENDS, fresh, lower_for_h200, poisoned, same_bits

VALUE, ROPE, ROWS, SCALE = 64, 32, 90, 0.15
KINDS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "packed": jnp.bfloat16}
CONFIGS = {
    "whole": SparseMLAConfig(splits=1, rows=16),
    "split": SparseMLAConfig(splits=3, rows=16, warps=2, stages=1),
    "many": SparseMLAConfig(splits=64, rows=16),
    "fixed": SparseMLAConfig(split_rows=32, rows=16),
}


class Case:
    """Lists of 0, 1, all and other numbers of rows; places past a count point at rows of NaN or outside the pool."""

    def __init__(self, kind, tokens=6, heads=5, width=40, value=VALUE, rope=ROPE, rows=ROWS):
        rng = fresh(kind, tokens, heads, width, value, rope)
        dtype = KINDS[kind]
        good, bad = np.arange(1, rows, 2), np.arange(0, rows, 2)
        latent = jnp.asarray(poisoned(rng, 2 * rows, value + rope, rows + good), dtype).reshape(2, rows, -1)
        self.pool = pack_rows(latent, value) if kind == "packed" else latent
        self.values = unpack_rows(self.pool, value, rope) if kind == "packed" else latent
        self.q = jnp.asarray(rng.normal(size=(tokens, heads, value + rope)), dtype)
        self.count = rng.integers(0, width + 1, tokens).astype(np.int32)
        self.count[: min(tokens, 4)] = [0, 1, width, 17][: min(tokens, 4)]
        listed = np.stack([rng.choice(good, width, replace=width > len(good)) for _ in range(tokens)])
        junk = rng.choice([*bad, rows, 2**30, -1], listed.shape)
        self.rows = np.where(np.arange(width) < self.count[:, None], listed, junk).astype(np.int32)
        self.value = value

    def run(self, backend, config=None, out_dtype=jnp.float32, **choice):
        call = functools.partial(
            sparse_mla,
            value_width=self.value,
            scale=SCALE,
            out_dtype=out_dtype,
            backend=backend,
            config=config,
            **choice,
        )
        return jax.jit(call)(self.q, self.pool, jnp.int32(1), self.rows, self.count)

    def want(self):
        q, pool = np.asarray(self.q, np.float64), np.asarray(self.values, np.float64)[1]
        out, lse = np.zeros((*q.shape[:2], self.value)), np.full(q.shape[:2], -np.inf)
        for t, n in enumerate(self.count):
            if n:
                keys = pool[self.rows[t, :n]]
                score = q[t] @ keys.T * SCALE
                top = score.max(1, keepdims=True)
                weight = np.exp(score - top)
                out[t] = weight / weight.sum(1, keepdims=True) @ keys[:, : self.value]
                lse[t] = top[:, 0] + np.log(weight.sum(1))
        return out, lse

    def check(self, out, lse, close):
        want = self.want()
        assert np.isfinite(want[0]).all(), "lists of this case name rows that must not be read"
        # Parts in bfloat16 are rounded by up to 2⁻⁹ of themselves.
        np.testing.assert_allclose(np.asarray(out, np.float64), want[0], atol=close, rtol=0 if close < 1e-3 else 2**-8)
        np.testing.assert_allclose(lse, want[1], atol=2e-5, rtol=1e-5)
        empty = self.count == 0
        assert empty.any()
        np.testing.assert_array_equal(np.asarray(out, np.float32)[empty], 0.0)
        np.testing.assert_array_equal(np.asarray(lse)[empty], -np.inf)


CLOSE = {"float32": 3e-6, "bfloat16": 2e-2, "packed": 2e-2}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_float64(kind, config, backend):
    case = Case(kind)
    out, lse = case.run(backend, CONFIGS[config])
    assert out.dtype == lse.dtype == jnp.float32
    case.check(out, lse, CLOSE[kind])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "tokens, heads, width, value, rope",
    [(1, 8, 64, 64, 16), (3, 1, 5, 16, 16), (2, 33, 16, 128, 32), (5, 16, 130, 64, 64)],
)
def test_odd_sizes_by_the_heuristic(tokens, heads, width, value, rope, backend):
    case = Case("bfloat16", tokens, heads, width, value, rope)
    if tokens == 1:
        case.count[:] = 0
    case.check(*case.run(backend), CLOSE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfloat16", "packed"])
@pytest.mark.parametrize("tokens, heads", [(1, 64), (4, 128), (16, 16), (33, 64), (130, 40)])
def test_wide_rows(tokens, heads, kind):
    case = Case(kind, tokens, heads, 2048, 512, 64, rows=6000)
    if tokens == 1:
        case.count[:] = 0
    case.check(*case.run("triton"), 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_at_all(backend):
    case = Case("bfloat16")
    case.count[:] = 0
    for config in CONFIGS.values():
        out, lse = case.run(backend, config)
        np.testing.assert_array_equal(out, np.zeros(out.shape))
        np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_repeat(backend):
    case = Case("bfloat16")
    first = case.run(backend, CONFIGS["split"])
    for _ in range(1 if backend == "interpret" else 20):
        same_bits(case.run(backend, CONFIGS["split"]), first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_invariant_bits_do_not_depend_on_the_other_tokens(backend):
    """Alone, or as one of 40: the heuristic would split other numbers of tokens elsewhere."""
    many = Case("bfloat16", tokens=40, heads=3, width=1100, rows=3000)
    together = many.run(backend, invariant=True)
    for t in (2, 3, 39):
        alone = Case("bfloat16", tokens=40, heads=3, width=1100, rows=3000)
        alone.q, alone.rows, alone.count = alone.q[t : t + 1], alone.rows[t : t + 1], alone.count[t : t + 1]
        # Beside shorter ones only, the list is as wide as it must be.
        alone.rows = alone.rows[:, : alone.count[0]]
        same_bits(alone.run(backend, invariant=True), jax.tree.map(lambda x, t=t: x[t : t + 1], together))


def test_the_loop_ends_with_the_count():
    """A list four times as wide gives the same bits: neither splits nor tiles come from the width."""
    case = Case("bfloat16")
    first = case.run("interpret", CONFIGS["split"])
    case.rows = np.pad(case.rows, ((0, 0), (0, 120)), constant_values=2**30)
    same_bits(case.run("interpret", CONFIGS["split"]), first)


def test_output_is_rounded_once():
    case = Case("bfloat16")
    wide, narrow = (case.run("interpret", CONFIGS["whole"], dtype)[0] for dtype in (jnp.float32, jnp.bfloat16))
    same_bits(wide.astype(jnp.bfloat16), narrow)


def test_reference_reads_packed_records():
    case = Case("packed")
    case.check(*case.run("xla"), CLOSE["packed"])


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 40, 64, 200])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_heuristic_serves_every_size(tokens, heads):
    config = SparseMLAConfig.choose(tokens, heads, 2048)
    assert config.heads >= 16
    assert config.splits >= 1
    assert SparseMLAConfig.choose(tokens, heads, 2048, invariant=True) == SparseMLAConfig.choose(
        1, heads, 2048, invariant=True
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tokens, heads, value, rope", [(1, 64, 512, 64), (64, 128, 512, 64), (128, 16, 512, 64), (4, 8, 64, 32)]
)
def test_lowers_for_an_h200(kind, tokens, heads, value, rope):
    dtype = KINDS[kind]
    shape = jax.ShapeDtypeStruct
    pool = shape((2, 1000, value + rope), dtype)
    if kind == "packed":
        pool = shape((2, 1000, packed_words(value, rope)), jnp.uint32)
    text = lower_for_h200(
        functools.partial(sparse_mla, value_width=value, scale=SCALE, out_dtype=dtype, backend="triton"),
        shape((tokens, heads, value + rope), dtype),
        pool,
        shape((), jnp.int32),
        shape((tokens, 2048), jnp.int32),
        shape((tokens,), jnp.int32),
    )
    assert "sparse_mla" in text


@pytest.mark.parametrize(
    "value, rope, dtype, records, what",
    [
        (48, 16, jnp.bfloat16, None, "powers of two from 16 on, got 48 and 16"),
        (64, 8, jnp.bfloat16, None, "powers of two from 16 on, got 64 and 8"),
        (64, 16, jnp.float16, None, "got float16"),
        (32, 32, jnp.bfloat16, jnp.uint32, "packed records of 64 to 512"),
        (64, 32, jnp.float32, jnp.uint32, "bfloat16 ones with packed records; got float32"),
    ],
)
def test_shapes_that_are_not_here(value, rope, dtype, records, what):
    pool = jnp.zeros((1, 8, value + rope), dtype)
    if records is not None:
        pool = pack_rows(pool, value)
    q = jnp.zeros((1, 4, value + rope), dtype)
    with pytest.raises(NotImplementedError, match=what):
        sparse_mla(
            q,
            pool,
            0,
            np.zeros((1, 16), np.int32),
            np.zeros(1, np.int32),
            value_width=value,
            scale=1.0,
            backend="triton",
        )
