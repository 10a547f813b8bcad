"""Where ranks of one process write parts for each other: *boxes*, and the handshake of those who use them.

A box is memory of one rank to which the others write by its address; `lse_merge_mosaic` is who does. It has two halves.
Merge number n of a program, from 0, does, in every block of its grid:

1. write parts and LSE into half n % 2 of the boxes of all others and then, released after them, n + 1 into their flags;
2. wait until the others' flags here are n + 1 at least; 3. merge, in the order of ranks, from half n % 2.

Blocks share nothing: block b of a rank writes to and waits for blocks b alone, at places that only they use, and counts n
for itself. Why that is enough:

- Nobody reads early: a flag of n + 1 is seen after what was written before it.
- Nobody overwrites what is still read: half n % 2 was read last by merge n − 2 of that rank. The writer is in merge n, so
  its merge n − 1 is over, for which it had that rank's flag n; and that was written by merge n − 1 of that rank, a kernel
  that begins when the one of merge n − 2 has ended.
- Nobody writes before a box is there, or when its memory is something else's: addresses come by a collective that follows
  the kernel that makes them and clears the flags; and a rank's last merge ends after all that is written to it, so that
  its memory may then be used for something else, or its program end.
- Nobody waits for a block that has no place to run: a block waits for those of its own number alone, and writes before it
  waits. An H200 runs all of a grid at a time (two blocks a multiprocessor, whatever registers they take); where one does not,
  blocks begin in the order of their numbers, so that the lowest number that is not done runs on every rank.
- Programs do not meet. Each execution makes boxes, and ranks exchange addresses in it, which waits for all of them; so one
  rank may be in the next program while another has not left this one.

Merges of a program must depend on each other, as layers do: nothing else keeps two of them from running at a time. A rank
that is late is waited for, but not for ever: a wait looks at its flag `BoxConfig.looks` times, about ten minutes, and then
traps. So a rank that never comes, or devices that get two programs in different orders, end in a failed launch, which the
engine reports. Looks are counted in a register, and only those in vain.

XLA knows boxes as inputs that nobody changes. A copy of one would be memory that the others do not write to, so each merge
compares addresses of parts, LSE and flags, and traps if they differ: the GPU reports a failed launch. Blocks count their
merges in a row of the flags, so that this count is compared as well: a merge that read 0 in a copy would not wait.
"""

import dataclasses
from typing import Any

import jax
from flax import struct
from jax import lax
from jax.experimental import pallas as pl


@dataclasses.dataclass(frozen=True)
class BoxConfig:
    """rows: of a tile, which is moved and merged at once. blocks: of a grid at most; all of them must run at a time. looks:
    of a wait at its flag before it traps, 0.5 to 0.7 µs each; 1 to 2**31 − 1."""

    rows: int = 4
    blocks: int = 264
    looks: int = 2**30

    def cut(self, tokens: int, heads: int, ranks: int) -> "Cut":
        """The merge of so many tokens and heads, which the ranks share evenly. Raises `NotImplementedError`."""
        if heads % ranks:
            raise NotImplementedError(f"{heads} heads are not shared evenly by {ranks} ranks: use another merge")
        mine, step = heads // ranks, self.rows
        while mine % step:
            step //= 2
        tiles = tokens * mine // step
        blocks = min(tiles, self.blocks)
        return Cut(tokens * mine, heads, mine, step, blocks, pl.cdiv(tiles, blocks))


@dataclasses.dataclass(frozen=True)
class Cut:
    """rows: that each rank merges, one for a token and one of its `mine` of all `heads`. step: rows of a tile. blocks: of
    the grid. trips: tiles of a block, which are `blocks` apart."""

    rows: int
    heads: int
    mine: int
    step: int
    blocks: int
    trips: int

    def source(self, row: jax.Array, rank: jax.Array) -> jax.Array:
        """Where row `row []` int32 of those that `rank []` int32 merges is in `[T, H]`, flat."""
        return lax.div(row, self.mine) * self.heads + rank * self.mine + lax.rem(row, self.mine)


@struct.dataclass
class Boxes:
    """One rank's, and where all of them lie.

    parts: `[2, ranks, blocks, rows, L]` in the parts' dtype, by half, by the rank that writes there, by its block.
    lse: `[2, ranks, blocks, rows]` float32. flags: `[ranks + 1, blocks]` int32, by the rank that writes there; the last row
    is what this rank's own blocks count, merges so far. rank: `[1]` int32.
    addresses: `[ranks, 3, 2]` int32, of `parts`, `lse` and `flags` of every rank.
    """

    parts: jax.Array
    lse: jax.Array
    flags: jax.Array
    rank: jax.Array
    addresses: jax.Array

    def place(self, turn: jax.Array, rank: jax.Array, block: jax.Array, at: jax.Array) -> jax.Array:
        """The row of `parts` and `lse`, flat, that `rank` writes to as its block's `at`-th in turn `turn`; all `[]` int32."""
        _, ranks, blocks, rows, _ = self.parts.shape
        return ((lax.rem(turn, 2) * ranks + rank) * blocks + block) * rows + at

    def check(self, cut: Cut, width: int, dtype: Any) -> None:
        """Raises `NotImplementedError` unless this merge, of parts `[…, width]` in `dtype`, fits."""
        _, _, blocks, rows, own = self.parts.shape
        if (own, self.parts.dtype) != (width, dtype) or cut.blocks > blocks or cut.trips * cut.step > rows:
            raise NotImplementedError(
                f"{cut.rows} rows of {width} {dtype} do not fit into boxes of {blocks} times {rows} rows of {own} "
                f"{self.parts.dtype}: open larger ones"
            )


def has_part(width: int) -> bool:
    """Whether there are boxes for parts of `width` values: whole vectors for each thread of a block."""
    return width % 512 == 0 or width in (128, 256)


def is_ahead(tokens: int, ranks: int) -> bool:
    """Whether a merge of so many tokens through boxes was measured ahead of an all-to-all, on H200."""
    return tokens <= 128 and ranks == 2
