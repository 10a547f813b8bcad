"""The routed experts of a step: Triton kernels that read each chosen expert once, in the form that it is stored in.

A *pair* is a token and one of its experts. A program serves pairs of one expert (`pairs.py`), so no expert is read that
nobody chose.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dcpjax.pallas_kernels.pairs import listed, of_pair, of_tile
from dcpjax.pallas_kernels.tiles import block_of, fit, prepared, product, served
from dcpjax.quant import QArray

# Of plain stacks; more quantised ones than that take less time as copies.
MOST_TOKENS = 64
MOST_QUANTISED = 256


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """into, out: columns of the hidden layer and of the result a program; depth: of one step along the sum; rows: pairs in a
    listed tile, 0 for a tile of all tokens without a list."""

    into: int = 32
    out: int = 64
    depth: int = 128
    warps: int = 4
    stages: int = 4
    rows: int = 0

    @classmethod
    def choose(cls, tokens: int, gate: jax.Array | QArray, down: jax.Array | QArray) -> "ExpertsConfig":
        """For stacks `gate [N, E, I, D]` and `down [N, E, D, I]`, plain of any dtype or quantised; a tile lies within a
        block of scales, if any."""
        width, inner = down.shape[-2:]
        into_block, out_block = block_of(gate), block_of(down)
        rows, (out, depth, warps, stages) = 0, (64, 128, 4, 3)
        if isinstance(gate, QArray):
            # Bytes are fewer, so those of the tokens must be too.
            rows = 0 if tokens <= 16 else 16 if tokens <= 256 else 64
            # Two warps read whole words of bytes from shared memory, four only pairs of bytes.
            warps = 2 if gate.packed else 4
        elif tokens > 16:
            # Measured: more tokens make the result's tile the larger part of what is moved.
            out, depth, warps, stages = (128, 64, 4, 4) if tokens <= 32 else (256, 64, 8, 4)
        return cls(
            into=fit(64, math.gcd(inner, into_block[0]), "hidden values"),
            out=fit(out, math.gcd(width, out_block[0]), "values"),
            depth=min(
                fit(depth, math.gcd(inner, out_block[1]), "hidden values"),
                fit(depth, math.gcd(width, into_block[1]), "values"),
            ),
            warps=warps,
            stages=stages,
            rows=rows,
        )


def most_tokens(stack: jax.Array | QArray) -> int:
    """Tokens of a step up to which this kernel is meant for a stack `[…, out, in]`, plain of any dtype or quantised."""
    return MOST_QUANTISED if isinstance(stack, QArray) else MOST_TOKENS


def readable(gate: jax.Array | QArray, up: jax.Array | QArray, down: jax.Array | QArray) -> bool:
    """Whether the kernels can read stacks `[…, out, in]`, plain of any dtype or quantised, as they are: gate and up meet the
    same tokens, so they are of one form."""
    forms = {isinstance(w, QArray) and w.packed for w in (gate, up)}
    return len(forms) == 1 and all(map(served, (gate, up, down)))


def experts_triton(
    x: jax.Array, experts: jax.Array, weight: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    layer: jax.Array | int, config: ExpertsConfig | None = None, interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """`experts_ffn` on the Triton backend, with its shapes and dtypes: `x [T, D]` → `[T, D]`. The stacks are those of all
    layers, `[N, E, …]`, plain or quantised: cutting one out would copy it.

    Raises `NotImplementedError` for more than `MOST_TOKENS` tokens without lists of pairs, widths that are no multiples of
    16, or quantised stacks that are not `served`.
    """
    tokens, width = x.shape
    per_token, inner = experts.shape[1], gate.shape[-2]
    if not readable(gate, up, down):
        raise NotImplementedError(
            "quantised stacks have blocks or a size that the kernel cannot read; widen them first"
        )
    if config is None:
        config = ExpertsConfig.choose(tokens, gate, down)
    if tokens > MOST_TOKENS and not config.rows:
        raise NotImplementedError(
            f"{tokens} tokens: the kernel serves at most {MOST_TOKENS}; use backend mosaic or xla"
        )
    pairs = tokens * per_token
    if config.rows:
        rows, lists = config.rows, listed(experts, gate.shape[-3], config.rows)
        mine = functools.partial(of_tile, pairs=pairs, per_token=per_token)
    else:
        rows = max(16, pl.next_power_of_2(tokens))
        lists = (jnp.pad(experts.reshape(-1), (0, pl.next_power_of_2(pairs) - pairs), constant_values=-1),)
        mine = functools.partial(of_pair, tokens=tokens, per_token=per_token, rows=rows)

    # Rows past the pairs take what is computed for tokens that did not choose the expert.
    def call(body, blocks, size, dtype, *tree):
        args, structure = jax.tree.flatten((lists, *tree))

        def kernel(*refs):
            lists, *ins = jax.tree.unflatten(structure, refs[:-1])
            body(mine(*lists), *ins, refs[-1], config=config, interpret=interpret)

        return pl.pallas_call(
            kernel,
            grid=(blocks, len(lists[0]) if config.rows else pairs),
            in_specs=[pl.BlockSpec(x.shape, lambda i, p, n=x.ndim: (0,) * n) for x in args],
            out_specs=pl.BlockSpec((pairs + rows, size), lambda i, p: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((pairs + rows, size), dtype),
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
            interpret=interpret,
            name=f"experts_{body.__name__.strip('_')}",
        )(*args)

    at = jnp.asarray(layer, jnp.int32).reshape(1)
    hidden = call(_into, inner // config.into, inner, x.dtype, prepared(x, gate), at, gate, up)
    out = call(_out, width // config.out, width, jnp.float32, prepared(hidden, down), at, down)
    return weighted_sum(out[:pairs].reshape(tokens, per_token, width), experts, weight).astype(x.dtype)


def weighted_sum(out: jax.Array, experts: jax.Array, weight: jax.Array) -> jax.Array:
    """Sum `[T, D]` float32 of the results `out [T, k, D]` by `weight [T, k]` float32, whatever stands where an expert
    is left out (−1 in `experts [T, k]` int32)."""
    return jnp.sum(jnp.where((experts < 0)[..., None], 0, out * weight[..., None]), axis=1)


def _into(mine, tokens, layer_ref, gate_ref, up_ref, out_ref, *, config, interpret):
    """`silu(gate x) * (up x)` of one expert and `into` hidden values, in the rows of its pairs."""
    expert, any_pair, pair, _, token = mine
    x_ref, factor_ref = tokens
    begin = pl.program_id(0) * config.into

    def read(start, size):
        return x_ref[token, pl.ds(start, size)]

    def step(i, acc):
        place = layer_ref[0], expert
        gate, up = (product(w, place, begin, config.into, i, config.depth, read, interpret) for w in (gate_ref, up_ref))
        return acc[0] + gate, acc[1] + up

    @pl.when(any_pair)
    def _():
        zero = jnp.zeros((config.into, len(pair)), jnp.float32)
        gate, up = jax.lax.fori_loop(0, x_ref.shape[1] // config.depth, step, (zero, zero))
        if factor_ref is not None:
            gate, up = gate * factor_ref[token][None], up * factor_ref[token][None]
        # Rounded as the products of whole matrices are.
        gate, up = gate.astype(out_ref.dtype).astype(jnp.float32), up.astype(out_ref.dtype).astype(jnp.float32)
        hidden = gate * (1 / (1 + jnp.exp(-gate))) * up
        out_ref[pair, pl.ds(begin, config.into)] = hidden.T.astype(out_ref.dtype)


def _out(mine, hidden, layer_ref, down_ref, out_ref, *, config, interpret):
    """`down` of one expert times the hidden values of its pairs, `out` values of each."""
    expert, any_pair, pair, real, _ = mine
    hidden_ref, factor_ref = hidden
    begin = pl.program_id(0) * config.out
    # The spare rows hold what was left there; whatever it is stays in its own row.
    source = jnp.where(real, pair, 0)

    def read(start, size):
        return hidden_ref[source, pl.ds(start, size)]

    def step(i, acc):
        place = layer_ref[0], expert
        return acc + product(down_ref, place, begin, config.out, i, config.depth, read, interpret)

    @pl.when(any_pair)
    def _():
        zero = jnp.zeros((config.out, len(pair)), jnp.float32)
        acc = jax.lax.fori_loop(0, hidden_ref.shape[1] // config.depth, step, zero)
        if factor_ref is not None:
            acc = acc * factor_ref[source][None]
        out_ref[pair, pl.ds(begin, config.out)] = acc.T
