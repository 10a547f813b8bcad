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

from dcpjax.pallas_kernels.pairs import listed, of_one, of_pair, of_tile
from dcpjax.pallas_kernels.tiles import (
    LONE,
    block_of,
    fit,
    lone_reader,
    prepared,
    prepared_hidden,
    product,
    reader,
    served,
    whole,
)
from dcpjax.quant import QArray


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """into, out: columns of the hidden layer and of the result a program; depth: of one step along the sum; rows: pairs in a
    listed tile, 0 for a tile of all tokens without a list, 1 for a pair by itself; into_splits, out_splits: programs that
    share a sum."""

    into: int = 32
    out: int = 64
    depth: int = 128
    warps: int = 4
    stages: int = 4
    rows: int = 0
    into_splits: int = 1
    out_splits: int = 1

    @classmethod
    def choose(cls, tokens: int, gate: jax.Array | QArray, down: jax.Array | QArray) -> "ExpertsConfig":
        """For stacks `gate [N, E, I, D]` and `down [N, E, D, I]`, plain of any dtype or quantised; a tile lies within a
        block of scales, if any."""
        width, inner = down.shape[-2:]
        into_block, out_block = block_of(gate), block_of(down)
        packed, quantised = isinstance(gate, QArray) and gate.packed, isinstance(gate, QArray)
        # Experts of a model with 256: with more tokens, more of them chose the same one.
        rows = 0 if tokens <= 16 else 16 if tokens <= 256 else 64
        into, out, depth, warps, stages, splits = 64, 64, 128, 4, 3, 1
        if tokens <= (1024 if packed else 512) and quantised:
            # Two warps read whole words of bytes from shared memory, four only pairs of bytes.
            rows, depth, warps = min(rows, 16), 256 if packed else 128, 2
            if tokens <= (4 if packed else 1):
                # Few chose the same expert: it may as well be read for each of them.
                rows = 1
            if tokens == 1:
                # So few programs would wait for memory more than they read it.
                into, splits = 64 if packed else 32, 2
        elif not quantised and 256 < tokens <= 512:
            rows = 32
        elif not quantised and tokens > 1024:
            into, out, depth, warps, rows = 128, 128, 64, 8, 128
        depth = min(
            fit(depth, math.gcd(inner, out_block[1]), "hidden values"),
            fit(depth, math.gcd(width, into_block[1]), "values"),
        )
        return cls(
            into=fit(into, math.gcd(inner, into_block[0]), "hidden values"),
            out=fit(out, math.gcd(width, out_block[0]), "values"),
            depth=depth,
            warps=warps,
            stages=stages,
            rows=rows,
            into_splits=math.gcd(splits, width // depth),
        )


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

    Raises `NotImplementedError` for widths that are no multiples of 16, and for quantised stacks that are not `served`.
    """
    tokens, width = x.shape
    per_token = experts.shape[1]
    if not readable(gate, up, down):
        raise NotImplementedError(
            "quantised stacks have blocks or a size that the kernel cannot read; widen them first"
        )
    if config is None:
        config = ExpertsConfig.choose(tokens, gate, down)
    pairs = tokens * per_token
    if config.rows > 1:
        rows, lists = config.rows, listed(experts, gate.shape[-3], config.rows)
        mine = functools.partial(of_tile, pairs=pairs, per_token=per_token)
    else:
        lists = (jnp.pad(experts.reshape(-1), (0, pl.next_power_of_2(pairs) - pairs), constant_values=-1),)
        rows, mine = 0, functools.partial(of_one, per_token=per_token)
        if not config.rows:
            rows = max(16, pl.next_power_of_2(tokens))
            mine = functools.partial(of_pair, tokens=tokens, per_token=per_token, rows=rows)

    # Rows past the pairs take what is computed where a tile has no pair.
    def parts(values, stacks, block, splits, dtype, of_pairs):
        """Each stack's products with the prepared `values` of its pairs: `[len(stacks), splits, pairs + rows, out]`."""
        shape = len(stacks), splits, pairs + rows, stacks[0].shape[-2]
        args, structure = jax.tree.flatten((lists, values, at, stacks))

        def kernel(*refs):
            lists, *ins = jax.tree.unflatten(structure, refs[:-1])
            _products(mine(*lists), *ins, refs[-1], block, config.depth, of_pairs, interpret)

        return pl.pallas_call(
            kernel,
            grid=(shape[-1] // block, len(lists[0]) if config.rows > 1 else pairs, splits),
            in_specs=[pl.BlockSpec(x.shape, lambda i, p, s, n=x.ndim: (0,) * n) for x in args],
            out_specs=pl.BlockSpec(shape, lambda i, p, s: (0, 0, 0, 0)),
            out_shape=jax.ShapeDtypeStruct(shape, dtype),
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
            interpret=interpret,
            name="experts_out" if of_pairs else "experts_into",
        )(*args)

    at = jnp.asarray(layer, jnp.int32).reshape(1)
    kind = x.dtype if config.into_splits == 1 else jnp.float32
    both = parts(prepared(x, gate, interpret), (gate, up), config.into, config.into_splits, kind, False)
    hidden = prepared_hidden(both, pairs, x.dtype, down, interpret)
    (out,) = parts(hidden, (down,), config.out, config.out_splits, jnp.float32, True)[:, :, :pairs].sum(1)
    return weighted_sum(out.reshape(tokens, per_token, width), experts, weight).astype(x.dtype)


def weighted_sum(out: jax.Array, experts: jax.Array, weight: jax.Array) -> jax.Array:
    """Sum `[T, D]` float32 of the results `out [T, k, D]` by `weight [T, k]` float32, whatever stands where an expert
    is left out (−1 in `experts [T, k]` int32)."""
    return jnp.sum(jnp.where((experts < 0)[..., None], 0, out * weight[..., None]), axis=1)


def _products(mine, values, layer_ref, stacks, out_ref, block, depth, of_pairs, interpret):
    """`block` values of each of the stacks' products for the pairs of one expert, or of one of the sum's parts."""
    expert, any_pair, pair, real, token = mine
    values_ref, factor_ref = values
    begin, split = pl.program_id(0) * block, pl.program_id(2)
    steps = values_ref.shape[1] // depth // out_ref.shape[1]
    source = jnp.where(real, pair, 0) if of_pairs else token
    alone = jnp.ndim(pair) == 0
    read = lone_reader(values_ref, source) if alone else reader(values_ref, source, real)
    places = LONE if alone else len(pair)

    def step(i, acc):
        place, number = (layer_ref[0], expert), split * steps + i
        return tuple(
            product(total, w, place, begin, block, number, depth, read, interpret)
            for total, w in zip(acc, stacks, strict=True)
        )

    @pl.when(any_pair)
    def _():
        zero = jnp.zeros((block, places), jnp.float32)
        made = jax.lax.fori_loop(0, steps, step, (zero,) * len(stacks))
        for i, (total, w) in enumerate(zip(made, stacks, strict=True)):
            total = whole(w, (layer_ref[0], expert), total, values_ref.dtype, interpret)
            if alone:
                # All columns are the same.
                total = jnp.sum(jnp.where(jnp.arange(places, dtype=jnp.int32)[None] == 0, total, 0), axis=1)
            if factor_ref is not None:
                total = total * factor_ref[source]
            out_ref[i, split, pair, pl.ds(begin, block)] = total.T.astype(out_ref.dtype)
