"""The routed experts of a few tokens: Triton kernels that read each chosen expert once.

A *pair* is a token and one of its experts. The grid has a place for every pair; the first pair of an expert serves all
tokens that chose it, the others end at once. So no list is made on the way, and no expert is read that nobody chose.

Quantised stacks are read as they are: FP8 tiles are multiplied in the tokens' dtype and their products scaled, since a tile
lies within one block of scales; NVFP4 numbers are scaled by their group first, which is exact in bfloat16.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dcpjax.quant import QArray, unpack_e2m1

MOST_TOKENS = 64
# Offsets into arrays of bytes are signed 32-bit numbers up to 4 GiB, where they become 64-bit ones.
_BAD_BYTES = range(1 << 31, 1 << 32)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """into, out: columns of the hidden layer and of the result a program; depth: of one step along the sum."""

    into: int = 32
    out: int = 64
    depth: int = 128
    warps: int = 4
    stages: int = 4

    @classmethod
    def choose(
        cls,
        tokens: int,
        inner: int,
        width: int,
        into_block: tuple[int, int] = (0, 0),
        out_block: tuple[int, int] = (0, 0),
    ) -> "ExpertsConfig":
        """For experts of `inner` hidden values between `width` of them; a tile lies within a block of scales, if any."""
        # Measured: more tokens make the result's tile the larger part of what is moved.
        out, depth, warps, stages = (
            (64, 128, 4, 3) if tokens <= 16 else (128, 64, 4, 4) if tokens <= 32 else (256, 64, 8, 4)
        )
        return cls(
            into=_fit(64, math.gcd(inner, into_block[0]), "hidden values"),
            out=_fit(out, math.gcd(width, out_block[0]), "values"),
            depth=min(
                _fit(depth, math.gcd(inner, out_block[1]), "hidden values"),
                _fit(depth, math.gcd(width, into_block[1]), "values"),
            ),
            warps=warps,
            stages=stages,
        )


def served(stack: jax.Array | QArray) -> bool:
    """Whether the kernel can read this stack as it is."""
    if not isinstance(stack, QArray):
        return True
    sizes, least = stack.shape[-2:], 16
    if stack.packed:
        # Two halves of a step along the sum.
        whole = sizes[0] % least == 0 and sizes[1] % (2 * least) == 0
    else:
        whole = all(math.gcd(size, block) >= least for size, block in zip(sizes, stack.block, strict=True))
    return whole and math.prod(stack.values.shape) not in _BAD_BYTES


def _fit(most: int, size: int, what: str) -> int:
    """The largest power of two up to `most` that divides `size`; at least 16."""
    block = min(size & -size, most)
    if block < 16:
        raise NotImplementedError(f"experts of {size} {what}: the kernel takes multiples of 16; use backend xla")
    return block


def experts_triton(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    layer: jax.Array | int, config: ExpertsConfig | None = None, interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """`experts_ffn` on the Triton backend, with its shapes and dtypes: `x [T, D]` → `[T, D]`. The stacks are those of all
    layers, `[N, E, …]`, plain or quantised: cutting one out would copy it.

    Raises `NotImplementedError` for more than `MOST_TOKENS` tokens, widths that are no multiples of 16, or quantised
    stacks that are not `served`.
    """
    tokens, width = x.shape
    per_token, inner = experts.shape[1], gate.shape[-2]
    if tokens > MOST_TOKENS:
        raise NotImplementedError(
            f"{tokens} tokens: the kernel serves at most {MOST_TOKENS}; use backend mosaic or xla"
        )
    if not all(map(served, (gate, up, down))):
        raise NotImplementedError("a quantised stack has blocks or a size that the kernel cannot read; widen it first")
    if config is None:
        config = ExpertsConfig.choose(tokens, inner, width, _block(gate), _block(down))
    pairs = tokens * per_token
    # Rows past the pairs take what is computed for tokens that did not choose the expert.
    rows = max(16, pl.next_power_of_2(tokens))
    flat = jnp.pad(experts.reshape(-1), (0, pl.next_power_of_2(pairs) - pairs), constant_values=-1)

    def call(body, blocks, size, dtype, *tree):
        args, structure = jax.tree.flatten(tree)

        def kernel(*refs):
            ins = jax.tree.unflatten(structure, refs[:-1])
            body(*ins, refs[-1], tokens=tokens, per_token=per_token, rows=rows, config=config)

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

    at = jnp.asarray(layer, jnp.int32).reshape(1)
    hidden = call(_into, inner // config.into, inner, x.dtype, x, flat, at, gate, up)
    out = call(_out, width // config.out, width, jnp.float32, hidden, flat, at, down)
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


def _block(stack: jax.Array | QArray) -> tuple[int, int]:
    """Rows and columns of a scale that a tile must not cross; 0: any."""
    if not isinstance(stack, QArray):
        return 0, 0
    return (0, 0) if stack.packed else stack.block


def _dot(weights, values):
    exact = jax.lax.Precision.HIGHEST if values.dtype == jnp.float32 else None
    return plt.dot(weights.astype(values.dtype), values, trans_b=True, precision=exact)


def _product(w, place, rows, step, depth, read):
    """Rows (begin, size) of the matrix at `place` (layer, expert) times the values of a step along the sum, `[size, tokens]` float32.

    `read(start, size, stride)` gives values `[tokens, size]`.
    """
    begin, size = rows
    first, across = step * depth, pl.ds(begin, size)
    if not isinstance(w, QArray):
        return _dot(w[*place, across, pl.ds(first, depth)], read(first, depth, 1))
    if not w.packed:
        scale = w.scales[*place, begin // w.block[0], first // w.block[1]]
        return scale * _dot(w.values[*place, across, pl.ds(first, depth)], read(first, depth, 1))
    # A byte holds values of two columns, which meet two strides of the tokens.
    half = depth // 2
    packed = w.values[*place, across, pl.ds(first // 2, half)]
    column = first // w.block[1] + jnp.arange(half, dtype=jnp.int32) * 2 // w.block[1]
    row = begin + jnp.arange(size, dtype=jnp.int32)
    scales = w.scales[*place, row[:, None], column[None, :]].astype(jnp.float32)
    parts = [
        _dot((number * scales).astype(jnp.float32), read(first + odd, half, 2))
        for odd, number in enumerate(unpack_e2m1(packed))
    ]
    return w.factor[*place] * (parts[0] + parts[1])


def _into(x_ref, flat_ref, layer_ref, gate_ref, up_ref, out_ref, *, tokens, per_token, rows, config):
    """`silu(gate x) * (up x)` of one expert and `into` hidden values, in the rows of its pairs."""
    expert, first, pair, _ = _chosen(flat_ref, tokens, per_token, rows)
    begin = pl.program_id(0) * config.into
    token = jnp.minimum(jnp.arange(rows, dtype=jnp.int32), tokens - 1)

    def read(start, size, stride):
        return x_ref[token, pl.ds(start, size, stride)]

    def step(i, acc):
        rows, place = (begin, config.into), (layer_ref[0], expert)
        gate, up = (_product(w, place, rows, i, config.depth, read) for w in (gate_ref, up_ref))
        return acc[0] + gate, acc[1] + up

    @pl.when(first)
    def _():
        zero = jnp.zeros((config.into, rows), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // config.depth, step, (zero, zero))
        # Rounded as the products of whole matrices are.
        gate, up = gate.astype(out_ref.dtype).astype(jnp.float32), up.astype(out_ref.dtype).astype(jnp.float32)
        hidden = gate * (1 / (1 + jnp.exp(-gate))) * up
        out_ref[pair, pl.ds(begin, config.into)] = hidden.T.astype(out_ref.dtype)


def _out(hidden_ref, flat_ref, layer_ref, down_ref, out_ref, *, tokens, per_token, rows, config):
    """`down` of one expert times the hidden values of its pairs, `out` values of each."""
    expert, first, pair, real = _chosen(flat_ref, tokens, per_token, rows)
    begin = pl.program_id(0) * config.out
    # The spare rows hold what was left there; whatever it is stays in its own row.
    source = jnp.where(real, pair, 0)

    def read(start, size, stride):
        return hidden_ref[source, pl.ds(start, size, stride)]

    def step(i, acc):
        place = layer_ref[0], expert
        return acc + _product(down_ref, place, (begin, config.out), i, config.depth, read)

    @pl.when(first)
    def _():
        zero = jnp.zeros((config.out, rows), jnp.float32)
        acc = jax.lax.fori_loop(0, hidden_ref.shape[1] // config.depth, step, zero)
        out_ref[pair, pl.ds(begin, config.out)] = acc.T
