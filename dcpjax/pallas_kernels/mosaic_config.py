"""Which calls the sparse MLA kernel for Hopper has, which of them it is best at, and the sizes it runs with.

Apart from the kernel, because that brings a compiler along which nothing else needs.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

# Values of a row, and of its rotated key.
WIDTHS = 512, 64
# Heads of a block: rows of a matrix instruction. Fewer heads are computed several times over.
HEADS = 64
# Rows of two tiles: what two consumers take at a time.
PAIR = 128
# Rows of a split when the bits of a token must not depend on the other tokens.
_INVARIANT_ROWS = 512


@dataclasses.dataclass(frozen=True)
class MosaicMLAConfig:
    """splits: parts a list is cut into, by its count, unless split_rows (whole pairs of tiles) fixes how many rows a part
    has. early: scores of every other tile are computed before the product of the tile ahead of it, which then is free a
    little later: good where rows come quickly, from the cache. interpret: by Pallas' interpreter of Hopper, for tests."""

    splits: int = 1
    split_rows: int | None = None
    early: bool = False
    interpret: bool = False

    @classmethod
    def choose(cls, tokens: int, heads: int, width: int, *, invariant: bool = False) -> "MosaicMLAConfig":
        """What was fastest on an H200: about as many blocks as it has multiprocessors, each with a pair of tiles at least of a
        list of `width` rows. `invariant`: the same for every number of tokens."""
        # Blocks of one token read the same rows, which then come from the cache.
        early = heads > HEADS
        if invariant:
            return cls(split_rows=_INVARIANT_ROWS, early=early)
        blocks = tokens * pl.cdiv(heads, HEADS)
        splits = next((n for n in (8, 4, 2) if n * blocks <= 132), 1)
        return cls(splits=max(1, min(splits, pl.cdiv(width, PAIR))), early=early)


def has_shape(heads: int, value: int, rope: int, dtype: Any) -> bool:
    """Whether the kernel has queries of so many heads over rows of `value` and `rope` numbers, bfloat16 or packed."""
    some = heads % HEADS == 0 or (HEADS % heads == 0 and heads % 8 == 0)
    return some and (value, rope) == WIDTHS and dtype in (jnp.bfloat16, jnp.uint32)


def is_ahead(tokens: int, heads: int, width: int, packed: bool = False, invariant: bool = False) -> bool:
    """Whether the kernel was measured ahead of the Triton one: lists of about `width` rows, plain or packed, on an H200.

    `invariant`: the same for every number of tokens.
    """
    if width < 512:
        return False
    if invariant:
        return heads == 64 and not packed
    return tokens >= 16 and (heads == 64 if packed else heads in (32, 64, 128))
