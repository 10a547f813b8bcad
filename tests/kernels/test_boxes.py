"""The handshake of boxes, run as its docstring says by ranks whose blocks take turns in any order, at the kernel's places."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.pallas_kernels.boxes import BoxConfig, Boxes, has_part

# Merges of one program, as tokens: their grids differ, and so do the tiles of a block.
PROGRAM = (3, 1, 4, 2, 4)
HEADS = 12


@functools.cache
def sources(config: BoxConfig, tokens: int, ranks: int) -> np.ndarray:
    """`[rows, ranks]`: where in the parts the rows are that each rank merges."""
    cut = config.cut(tokens, HEADS, ranks)
    return np.asarray(jax.jit(cut.source)(*jnp.ix_(jnp.arange(cut.rows), jnp.arange(ranks))))


class Misread(Exception):
    """A rank reads something else than what was sent for this."""


class Ranks:
    """Memory of ranks, and one coroutine for each block that is running. A cell holds who wrote it for which merge and row."""

    def __init__(self, ranks: int, config: BoxConfig, halves: int = 2):
        self.ranks, self.config, self.halves = ranks, config, halves
        largest = config.cut(max(PROGRAM), HEADS, ranks)
        shape = (2, ranks, config.blocks, largest.step * largest.trips)
        self.boxes = jax.eval_shape(lambda: Boxes(jnp.zeros((*shape, 128)), *[jnp.zeros(shape)] * 4))
        axes = jnp.ix_(*(jnp.arange(n) for n in shape))
        self.place = np.asarray(jax.jit(self.boxes.place)(*axes))
        self.cells = [{} for _ in range(ranks)]
        self.flags = np.zeros((ranks, ranks + 1, config.blocks), int)
        self.done = [0] * ranks
        self.running = [[] for _ in range(ranks)]

    def block(self, me: int, number: int, block: int):
        """What a block of rank `me` does in merge `number`, a step at a time; True while it waits."""
        cut = self.config.cut(PROGRAM[number], HEADS, self.ranks)
        source = sources(self.config, PROGRAM[number], self.ranks)
        turn = self.flags[me, self.ranks, block]
        half = turn % self.halves
        tiles = [(block + n * cut.blocks, n) for n in range(cut.trips)]
        rows = [(tile * cut.step + i, n * cut.step + i) for tile, n in tiles for i in range(cut.step)]
        rows = [(row, at) for row, at in rows if row < cut.rows]
        others = [(me + ahead) % self.ranks for ahead in range(1, self.ranks)]
        for peer in others:
            for row, at in rows:
                self.cells[peer][self.place[half, me, block, at]] = number, source[row, peer]
                yield False
            self.flags[peer, me, block] = turn + 1
            yield False
        for peer in others:
            while self.flags[me, peer, block] < turn + 1:
                yield True
        self.flags[me, self.ranks, block] += 1
        for row, at in rows:
            for peer in others:
                found = self.cells[me][self.place[half, peer, block, at]]
                if found != (number, source[row, me]):
                    raise Misread(
                        f"merge {number} of rank {me} reads row {source[row, me]} of {peer}, and finds {found}"
                    )
                yield False

    def run(self, order: random.Random, favoured: int) -> None:
        """The program on all ranks, steps in this order; `favoured` goes on as long as it can most of the time."""
        waiting = 0
        while min(self.done) < len(PROGRAM):
            rank = favoured if order.random() < 0.9 and waiting == 0 else order.randrange(self.ranks)
            if self.done[rank] == len(PROGRAM):
                waiting += 1
                continue
            if not self.running[rank]:
                blocks = self.config.cut(PROGRAM[self.done[rank]], HEADS, self.ranks).blocks
                self.running[rank] = [self.block(rank, self.done[rank], b) for b in range(blocks)]
            at = order.randrange(len(self.running[rank]))
            try:
                waiting = waiting + 1 if next(self.running[rank][at]) else 0
            except StopIteration:
                del self.running[rank][at]
                self.done[rank] += not self.running[rank]
                waiting = 0
            assert waiting < 10_000, "all of them wait"


@pytest.mark.parametrize("ranks, config", [(2, BoxConfig(2, 3)), (3, BoxConfig(4, 2)), (4, BoxConfig(1, 5))])
def test_any_order_reads_what_was_sent_for_it(ranks, config):
    for seed in range(20):
        Ranks(ranks, config).run(random.Random(seed), favoured=seed % ranks)


def test_one_half_would_not_do():
    """That is, the test above sees what is overwritten too early."""
    with pytest.raises(Misread):
        for seed in range(20):
            Ranks(2, BoxConfig(2, 3), halves=1).run(random.Random(seed), favoured=0)


def test_every_row_has_a_place_of_its_own():
    cut = BoxConfig(4, 3).cut(5, HEADS, 2)
    assert (cut.rows, cut.mine, cut.step, cut.blocks, cut.trips) == (30, 6, 2, 3, 5)
    found = sources(BoxConfig(4, 3), 5, 2).T.ravel().tolist()
    assert sorted(found) == list(range(60))
    assert found[:7] == [0, 1, 2, 3, 4, 5, 12]
    places = Ranks(2, BoxConfig(4, 3)).place
    assert sorted(places.ravel().tolist()) == list(range(places.size))


def test_what_does_not_fit():
    with pytest.raises(NotImplementedError, match="12 heads are not shared evenly by 5 ranks"):
        BoxConfig().cut(5, HEADS, 5)
    boxes = Ranks(2, BoxConfig(2, 3)).boxes
    small = BoxConfig(2, 3).cut(4, HEADS, 2)
    boxes.check(small, 128, jnp.float32)
    for cut, width, dtype in (
        (BoxConfig(2, 3).cut(5, HEADS, 2), 128, jnp.float32),
        (BoxConfig(2, 4).cut(4, HEADS, 2), 128, jnp.float32),
        (small, 256, jnp.float32),
        (small, 128, jnp.bfloat16),
    ):
        with pytest.raises(
            NotImplementedError, match="do not fit into boxes of 3 times 8 rows of 128 float32: open larger"
        ):
            boxes.check(cut, width, dtype)
    assert [width for width in (64, 128, 256, 384, 512, 1024) if has_part(width)] == [128, 256, 512, 1024]
