"""The routed experts of a few tokens: Triton kernels that read each chosen expert once.

A *pair* is a token and one of its experts. The grid has a place for every pair; the first pair of an expert serves all
tokens that chose it, the others end at once. So no list is made on the way, and no expert is read that nobody chose.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

MOST_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """into, out: columns of the hidden layer and of the result a program; depth: of one step along the sum."""

    into: int = 32
    out: int = 64
    depth: int = 128
    warps: int = 4
    stages: int = 4

    @classmethod
    def choose(cls, tokens: int, inner: int, width: int) -> "ExpertsConfig":
        """For experts of `inner` hidden values between `width` of them."""
        # Measured: more tokens make the result's tile the larger part of what is moved.
        out, depth, warps, stages = (
            (64, 128, 4, 3) if tokens <= 16 else (128, 64, 4, 4) if tokens <= 32 else (256, 64, 8, 4)
        )
        return cls(
            into=_fit(64, inner, "hidden values"),
            out=_fit(out, width, "values"),
            depth=min(_fit(depth, inner, "hidden values"), _fit(depth, width, "values")),
            warps=warps,
            stages=stages,
        )


def _fit(most: int, size: int, what: str) -> int:
    """The largest power of two up to `most` that divides `size`; at least 16."""
    block = min(size & -size, most)
    if block < 16:
        raise NotImplementedError(f"experts of {size} {what}: the kernel takes multiples of 16; use backend xla")
    return block


def experts_triton(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    config: ExpertsConfig | None = None, interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """`experts_ffn` on the Triton backend, with its shapes and dtypes: `x [T, D]` → `[T, D]`.

    Raises `NotImplementedError` for more than `MOST_TOKENS` tokens or widths that are no multiples of 16.
    """
    tokens, width = x.shape
    per_token, inner = experts.shape[1], gate.shape[1]
    if tokens > MOST_TOKENS:
        raise NotImplementedError(
            f"{tokens} tokens: the kernel serves at most {MOST_TOKENS}; use backend mosaic or xla"
        )
    if config is None:
        config = ExpertsConfig.choose(tokens, inner, width)
    pairs = tokens * per_token
    # Rows past the pairs take what is computed for tokens that did not choose the expert.
    rows = max(16, pl.next_power_of_2(tokens))
    flat = jnp.pad(experts.reshape(-1), (0, pl.next_power_of_2(pairs) - pairs), constant_values=-1)

    def call(body, blocks, size, dtype, *args):
        def kernel(*refs):
            body(*refs, tokens=tokens, per_token=per_token, rows=rows, config=config)

        return pl.pallas_call(
            kernel,
            grid=(blocks, pairs),
            in_specs=[pl.BlockSpec(x.shape, lambda i, p, n=x.ndim: (0,) * n) for x in args],
            out_specs=pl.BlockSpec((pairs + rows, size), lambda i, p: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((pairs + rows, size), dtype),
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
            interpret=interpret,
            name=f"experts_{body.__name__.strip('_')}",
        )(*args)

    hidden = call(_into, inner // config.into, inner, x.dtype, x, flat, gate, up)
    out = call(_out, width // config.out, width, jnp.float32, hidden, flat, down)
    return weighted_sum(out[:pairs].reshape(tokens, per_token, width), experts, weight).astype(x.dtype)


def weighted_sum(out: jax.Array, experts: jax.Array, weight: jax.Array) -> jax.Array:
    """Sum `[T, D]` float32 of the results `out [T, k, D]` by `weight [T, k]` float32, whatever stands where an expert
    is left out (−1 in `experts [T, k]` int32)."""
    return jnp.sum(jnp.where((experts < 0)[..., None], 0, out * weight[..., None]), axis=1)


def _chosen(flat_ref, tokens, per_token, rows):
    """This pair's expert, whether the pair is the expert's first, and each token's pair with it, or a spare row."""
    pair = pl.program_id(1)
    expert = flat_ref[pair]
    every = flat_ref[...]
    place = jnp.arange(every.shape[0], dtype=jnp.int32)
    mine = every == expert
    first = (expert >= 0) & (jnp.sum((mine & (place < pair)).astype(jnp.int32)) == 0)
    token = jnp.arange(rows, dtype=jnp.int32)
    at = jnp.full((rows,), -1, jnp.int32)
    for j in range(per_token):
        it = jnp.minimum(token, tokens - 1) * per_token + j
        at = jnp.where((flat_ref[it] == expert) & (token < tokens), it, at)
    return expert, first, jnp.where(at < 0, tokens * per_token + token, at), at >= 0


def _dot(weights, values):
    exact = jax.lax.Precision.HIGHEST if values.dtype == jnp.float32 else None
    return plt.dot(weights.astype(values.dtype), values, trans_b=True, precision=exact)


def _into(x_ref, flat_ref, gate_ref, up_ref, out_ref, *, tokens, per_token, rows, config):
    """`silu(gate x) * (up x)` of one expert and `into` hidden values, in the rows of its pairs."""
    expert, first, pair, _ = _chosen(flat_ref, tokens, per_token, rows)
    begin = pl.program_id(0) * config.into
    token = jnp.minimum(jnp.arange(rows, dtype=jnp.int32), tokens - 1)

    def step(i, acc):
        along = pl.ds(i * config.depth, config.depth)
        x = x_ref[token, along]
        gate = gate_ref[expert, pl.ds(begin, config.into), along]
        up = up_ref[expert, pl.ds(begin, config.into), along]
        return acc[0] + _dot(gate, x), acc[1] + _dot(up, x)

    @pl.when(first)
    def _():
        zero = jnp.zeros((config.into, rows), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // config.depth, step, (zero, zero))
        # Rounded as the products of whole matrices are.
        gate, up = gate.astype(out_ref.dtype).astype(jnp.float32), up.astype(out_ref.dtype).astype(jnp.float32)
        hidden = gate * (1 / (1 + jnp.exp(-gate))) * up
        out_ref[pair, pl.ds(begin, config.into)] = hidden.T.astype(out_ref.dtype)


def _out(hidden_ref, flat_ref, down_ref, out_ref, *, tokens, per_token, rows, config):
    """`down` of one expert times the hidden values of its pairs, `out` values of each."""
    expert, first, pair, real = _chosen(flat_ref, tokens, per_token, rows)
    begin = pl.program_id(0) * config.out
    # The spare rows hold what was left there; whatever it is stays in its own row.
    source = jnp.where(real, pair, 0)

    def step(i, acc):
        along = pl.ds(i * config.depth, config.depth)
        return acc + _dot(down_ref[expert, pl.ds(begin, config.out), along], hidden_ref[source, along])

    @pl.when(first)
    def _():
        zero = jnp.zeros((config.out, rows), jnp.float32)
        acc = jax.lax.fori_loop(0, hidden_ref.shape[1] // config.depth, step, zero)
        out_ref[pair, pl.ds(begin, config.out)] = acc.T
