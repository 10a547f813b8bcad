"""Which calls the kernels for Hopper have, which of them they are best at, and the sizes they run with.

Apart from the kernels, because those bring a compiler along which nothing else needs.
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
# Of the indexer: values of a key, and keys that one product takes.
DIM, KEYS = 128, 64
# Rows of a split when the bits of a token must not depend on the other tokens.
_INVARIANT_ROWS = 512
MULTIPROCESSORS = 132
# How many clusters of so many blocks run at once, one block on a multiprocessor. A cluster lies within one of the chip's eight
# groups of at most 18 of these, of which each chip lacks others: so many there are at the worst.
_CLUSTERS = {2: 66, 4: 29, 8: 13, 16: 5}
# Microseconds on an H200: until a block has its first tile, of a part, of a pair of tiles, and of merging 64 heads of a part.
_BEGIN_US, _PART_US, _PAIR_US, _MERGE_US = 8, 4, 3.6, 0.022
# Tokens from which on the kernel is ahead, by heads: of lists of 2,048 rows, and of shorter ones.
_PLAIN_FROM = {32: (1, 16), 64: (1, 4), 128: (1, 2)}
_PACKED_FROM = {16: (8, 64), 32: (3, 16), 64: (2, 4), 128: (1, 4)}


@dataclasses.dataclass(frozen=True)
class MosaicMLAConfig:
    """splits: parts a list is cut into, by its count, unless split_rows (whole pairs of tiles) fixes how many rows a part
    has. in_turn: parts, of one token and of the next ones, that a block computes one after the other, where they are in
    bfloat16. columns: blocks that share a part, each with its columns of the output, and all scores. Neither changes any bits.
    cluster: the blocks of a list's splits merge them where they can, and there is no second kernel. It changes bits.
    early: scores of every other tile are computed before the product of the tile ahead of it, which then is free a little
    later: good where rows come quickly, from the cache. interpret: by Pallas' interpreter of Hopper, for tests."""

    splits: int = 1
    split_rows: int | None = None
    in_turn: int = 1
    columns: int = 1
    cluster: bool = False
    early: bool = False
    interpret: bool = False

    @classmethod
    def choose(
        cls, tokens: int, heads: int, width: int, *, packed: bool = False, invariant: bool = False
    ) -> "MosaicMLAConfig":
        """What was fastest on an H200: about as many blocks as it has multiprocessors, each with a pair of tiles at least of a
        list of `width` rows, plain or packed. `invariant`: with the same bits for every number of tokens."""
        # Blocks of one token read the same rows, which then come from the cache. Records are waited for all the same.
        early = heads > HEADS and not packed
        head_blocks = pl.cdiv(heads, HEADS)
        blocks = tokens * head_blocks
        if invariant:
            in_turn, columns = _dealt(blocks, pl.cdiv(width, _INVARIANT_ROWS))
            early |= in_turn > 1 and not packed
            return cls(split_rows=_INVARIANT_ROWS, in_turn=in_turn, columns=columns, early=early)
        if blocks > MULTIPROCESSORS:
            splits, in_turn = _in_turn(tokens, head_blocks, width)
            return cls(splits=splits, in_turn=in_turn, early=not packed)
        splits = next((n for n in (16, 8, 4, 2) if n * blocks <= MULTIPROCESSORS), 1)
        splits = max(1, min(splits, pl.cdiv(width, PAIR)))
        cluster = blocks <= _CLUSTERS.get(splits, 0) and _shared(heads, splits)
        # Blocks that share a part have less to send to each other.
        columns = next((n for n in (4, 2) if cluster and n * blocks <= _CLUSTERS[splits]), 1)
        return cls(splits=splits, columns=columns, cluster=cluster, early=early)

    def clustered(self, splits: int, heads: int) -> bool:
        """Whether a cluster merges `splits` splits of `heads` heads."""
        return self.cluster and self.split_rows is None and self.in_turn == 1 and _shared(heads, splits)


def _shared(heads: int, splits: int) -> bool:
    """Whether there are clusters of `splits` blocks, of which each can merge as many heads."""
    return splits in _CLUSTERS and min(heads, HEADS) % splits == 0


def _in_turn(tokens: int, head_blocks: int, width: int) -> tuple[int, int]:
    """Parts of a list, and parts that a block takes in turn, where there are more blocks than multiprocessors: in the least
    time on the whole chip."""

    def us(choice):
        splits, in_turn = choice
        rounds = pl.cdiv(pl.cdiv(tokens * splits, in_turn) * head_blocks, MULTIPROCESSORS)
        part = _PART_US + _PAIR_US * pl.cdiv(pl.cdiv(width, PAIR), splits)
        merge = _MERGE_US * tokens * head_blocks * splits if splits > 1 else 0
        return rounds * (_BEGIN_US + in_turn * part) + merge

    return min(((splits, in_turn) for splits in (1, 2) for in_turn in range(1, 6)), key=us)


def _dealt(blocks: int, splits: int) -> tuple[int, int]:
    """Splits that a block takes in turn, and blocks that share one, where all are `splits` times `blocks`: in the least time on
    the whole chip, and then in as few blocks as can be."""

    def splits_long(in_turn):
        return pl.cdiv(blocks * pl.cdiv(splits, in_turn), MULTIPROCESSORS) * in_turn

    columns = next((n for n in (4, 2) if n * blocks * splits <= MULTIPROCESSORS), 1)
    return min((4, 2, 1), key=splits_long), columns


def has_shape(heads: int, value: int, rope: int, dtype: Any) -> bool:
    """Whether the kernel has queries of so many heads over rows of `value` and `rope` numbers, bfloat16 or packed."""
    some = heads % HEADS == 0 or (HEADS % heads == 0 and heads % 8 == 0)
    return some and (value, rope) == WIDTHS and dtype in (jnp.bfloat16, jnp.uint32)


def is_ahead(tokens: int, heads: int, width: int, packed: bool = False, invariant: bool = False) -> bool:
    """Whether the kernel was measured ahead of the Triton one: lists of about `width` rows, plain or packed, on an H200. Of few
    tokens by about a microsecond, because its call costs the host more.

    `invariant`: whether it serves all of them, because one kernel must; by what is the same in all steps.
    """
    if invariant:
        return heads in (_PACKED_FROM if packed else _PLAIN_FROM)
    if width < 512:
        return False
    long = width >= 2048
    if heads == 16 and not packed:  # which is little to compute: ahead of two kernels where a cluster merges
        return long and 4 <= tokens <= _CLUSTERS[16]
    least = _PACKED_FROM if packed else _PLAIN_FROM
    return heads in least and tokens >= least[heads][0 if long else 1]


@dataclasses.dataclass(frozen=True)
class MosaicScoresConfig:
    """chunks: programs that share the keys of a group of tokens. ahead: tiles that are read ahead."""

    chunks: int
    ahead: int = 2

    @classmethod
    def choose(cls, groups: int, columns: int, packed: bool, queries: int, heads: int) -> "MosaicScoresConfig":
        """What was fastest on an H200 for `groups` groups of `queries` tokens of `heads` heads over `columns` keys, packed or
        bfloat16: programs that fill it once, if they are not long, and many short ones elsewhere."""
        tiles, rows = pl.cdiv(columns, KEYS), queries * pl.cdiv(heads, 32) * 32
        slots = MULTIPROCESSORS * (4 if rows <= 64 else 3 if rows <= 128 else 2)
        chunks = slots // groups
        # Tiles of a short program, and of the longest that may be one of those which all run at once.
        short, most = ((6, 16) if packed else (4, 4)) if queries == 1 else (16, 32 if packed else 96)
        if chunks and tiles <= chunks * (most if chunks * groups >= 0.85 * slots else short):
            return cls(min(chunks, tiles))
        if queries > 1 and tiles * groups > 8 * short * slots:
            short *= 2
        return cls(pl.cdiv(tiles, short))


def has_keys(dim: int, heads: int, page: int, dtype: jnp.dtype) -> bool:
    """Whether the kernel has keys of `dim` values in `dtype`, uint32 for packed ones, in pages of `page` rows."""
    step = {jnp.dtype(jnp.uint32): 32, jnp.dtype(jnp.bfloat16): 8}.get(jnp.dtype(dtype))
    if step is None or dim != DIM or heads > 64:
        return False
    return page % step == 0 and (KEYS % page == 0 or page % KEYS == 0)
