"""A product of a few tokens with a quantised matrix: a Triton kernel that reads the matrix once, as it is stored.

Programs share out the matrix's rows, and where these are few, the sum too: its parts are added up afterwards, always in the
same order.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from dcpjax.pallas_kernels.tiles import block_of, fit, prepared, product, reader, served, whole
from dcpjax.quant import LayerOf, QArray

# Fewer would leave some of an H200's 132 multiprocessors without work.
_PROGRAMS = 256


@dataclasses.dataclass(frozen=True)
class ProjectionConfig:
    """out: rows of the matrix a program; depth: of one step along the sum; splits: programs that share a sum."""

    out: int = 64
    depth: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4

    @classmethod
    def choose(cls, tokens: int, w: QArray | LayerOf) -> "ProjectionConfig":
        """For `w [out, in]`; a tile lies within a block of scales, if any."""
        (rows, columns), block = w.shape, block_of(w.stack if isinstance(w, LayerOf) else w)
        # More tokens are read again by every program: fewer, larger ones then.
        out = fit(64 if tokens <= 32 else 128, math.gcd(rows, block[0]), "rows")
        depth = fit(128, math.gcd(columns, block[1]), "columns")
        most, splits = columns // depth, 1
        while rows // out * splits < _PROGRAMS and most % (2 * splits) == 0 and splits < 16:
            splits *= 2
        return cls(out, depth, splits)


def projection_triton(
    x: jax.Array, w: QArray | LayerOf, config: ProjectionConfig | None = None, interpret: bool = False
) -> jax.Array:
    """`linear` on the Triton backend: `x [T, in]` times `w [out, in]` → `[T, out]`, accumulated in float32, in x's dtype.

    Raises `NotImplementedError` for plain matrices, and for quantised ones that are not `served`.
    """
    if not isinstance(w, (QArray, LayerOf)) or not served(w.stack if isinstance(w, LayerOf) else w):
        raise NotImplementedError("the kernel reads quantised matrices whose blocks and sizes it has; use backend xla")
    stack, layer = (w.stack, w.layer) if isinstance(w, LayerOf) else (jax.tree.map(lambda a: a[None], w), 0)
    if config is None:
        config = ProjectionConfig.choose(len(x), w)
    (tokens, width), rows = x.shape, w.shape[0]
    steps = width // config.depth // config.splits
    args, structure = jax.tree.flatten((prepared(x, stack, interpret), jnp.asarray(layer, jnp.int32).reshape(1), stack))

    def kernel(*refs):
        ins = jax.tree.unflatten(structure, refs[:-1])
        _project(*ins, refs[-1], tokens=tokens, steps=steps, config=config, interpret=interpret)

    shape = (config.splits, tokens, rows)
    parts = pl.pallas_call(
        kernel,
        grid=(rows // config.out, config.splits),
        in_specs=[pl.BlockSpec(a.shape, lambda i, s, n=a.ndim: (0,) * n) for a in args],
        out_specs=pl.BlockSpec(shape, lambda i, s: (0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype if config.splits == 1 else jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="projection",
    )(*args)
    return parts[0] if config.splits == 1 else parts.sum(0).astype(x.dtype)


def _project(x, layer_ref, w, out_ref, *, tokens, steps, config, interpret):
    """`out` values of all tokens, or of `splits` parts of them one."""
    x_ref, factor_ref = x
    begin, split = pl.program_id(0) * config.out, pl.program_id(1)
    row = jnp.arange(max(16, pl.next_power_of_2(tokens)), dtype=jnp.int32)
    real, token = row < tokens, jnp.minimum(row, tokens - 1)
    read = reader(x_ref, token, real)

    def step(i, acc):
        return product(acc, w, (layer_ref[0],), begin, config.out, split * steps + i, config.depth, read, interpret)

    acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((config.out, len(token)), jnp.float32))
    acc = whole(w, (layer_ref[0],), acc, x_ref.dtype, interpret)
    if factor_ref is not None:
        acc = acc * factor_ref[token][None]
    column = begin + jnp.arange(config.out, dtype=jnp.int32)
    mine = jnp.broadcast_to(real[:, None], (len(row), config.out))
    plt.store(out_ref.at[split, row[:, None], column[None]], acc.T.astype(out_ref.dtype), mask=mine)
