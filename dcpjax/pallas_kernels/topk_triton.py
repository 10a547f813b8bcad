"""The best k of each row: Triton kernels.

Of a long row a sample is looked at first. A score that a little more than k of the row should reach, going by the sample, is
its pivot; one pass counts what is above it, a second lists that, in order, and the best k of the list are the row's. Where
the sample misled, the last step takes the whole row in place of the list: slower, and the same set. It needs only that last
step where a program holds the row.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Stands for "no slot" in a selection: larger than any slot, so it sorts last. Masked before any gather.
NO_SLOT = 2**30

_LOWEST = -(2**31)  # the key of what is not there; below that of every score
_LARGEST = 2**31 - 1
_MINUS_INF, _INF = -0x7F800001, 0x7F800000  # keys
_COARSE = 12
_NOWHERE = 2**30  # a place that is not stored to; past the end, or the interpreter would write back what was there


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """room: columns of a row that needs no sample, and of a list; held: those of a list that stay in registers. sample:
    scores that are looked at first. chunk: columns a program of a pass, in steps of `lanes`, at most 255. All powers of two.

    warps: of programs of a pass; warps_held: of those that have a row each.
    """

    room: int = 8192
    held: int = 4096
    sample: int = 4096
    chunk: int = 4096
    lanes: int = 1024
    warps: int = 4
    warps_held: int = 8

    def __post_init__(self):
        sizes = (self.room, self.held, self.sample, self.chunk, self.lanes)
        if any(size < 1 or size & (size - 1) for size in sizes):
            raise ValueError(f"room, held, sample, chunk and lanes {sizes} must be powers of two")
        if not self.lanes <= self.chunk <= 255 * self.lanes:
            raise ValueError(f"chunk {self.chunk} must be 1 to 255 times lanes {self.lanes}")

    @classmethod
    def choose(cls, rows: int, columns: int) -> "TopkConfig":
        """For `rows` rows of `columns`: as large chunks as leave every multiprocessor a few programs."""
        chunk = 2**13
        while chunk > 1024 and rows * pl.cdiv(columns, chunk) < 512:
            chunk //= 2
        # Of a long row few of the sample are among the best, so that the list must be longer to be safe.
        size = 8192 if columns > 2**18 else 4096
        return cls(held=size, sample=size, chunk=chunk)


def select_triton(
    score: jax.Array, slot: jax.Array, k: int, config: TopkConfig | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The best `k` of `score [T, C]` float32: scores `[T, k]` and slots `[T, k]` int32; −inf and `NO_SLOT` fill the rest.

    `slot` int32 is `[C]`, ascending, or `[T, C]`, each row's own and all different where the score is not −inf.
    They come in the order of the columns. Among equals (−0.0 and 0.0 too) the lower slot is better. −inf is never in.
    Raises `ValueError` for k above C.
    """
    rows, columns = score.shape
    if k > columns:
        raise ValueError(f"k {k} must be at most the columns, {columns}")
    if config is None:
        config = TopkConfig.choose(rows, columns)
    lists, held = (), pl.next_power_of_2(columns)
    if columns > config.room:
        lists, held = _list(score, k, config, interpret), config.held
    return _call(
        _finish,
        (1, rows),
        [((k,), jnp.float32), ((k,), jnp.int32)],
        [score, slot, *lists],
        config.warps_held,
        interpret,
        shared=1 if slot.ndim == 1 else None,
        k=k,
        held=held,
        own=slot.ndim > 1,
    )


def _list(score, k, config, interpret):
    """Scores and columns `[T, room]` of those that are above a pivot, in order, and their number `[T, 1]`: −1 if too many."""
    rows, columns = score.shape
    sample = min(config.sample, columns)
    mean = k * sample / columns
    # Five standard deviations above what is expected: that fewer than k columns are above it happens once in a million.
    rank = min(math.ceil(mean + 5 * math.sqrt(mean)) + 2, sample)
    # Taken out by all multiprocessors; the rows' own programs would wait for it one after another.
    stride = columns // sample
    looked_at = score[:, : stride * sample : stride]
    (pivot,) = _call(_pivot, (1, rows), [((1,), jnp.float32)], [looked_at], 8, interpret, rank=rank)
    # A program looks at all chunks at once, and the backend's arrays are powers of two.
    grid = (pl.next_power_of_2(pl.cdiv(columns, config.chunk)), rows)
    options = {"config": config, "k": k}
    counts = _call(_count, grid, [((grid[0],), jnp.int32)] * 3, [score, pivot], config.warps, interpret, config=config)
    return _call(
        _gather,
        grid,
        [((config.room,), jnp.float32), ((config.room,), jnp.int32), ((1,), jnp.int32)],
        [score, pivot, *counts],
        config.warps,
        interpret,
        **options,
    )


def _call(body, grid, outputs, args, warps, interpret, shared=None, **static):
    """Programs (chunk, row) of `body`, which get their row of every argument but the one that is `shared`."""

    def kernel(*refs):
        body(*refs, **static)

    def row(shape):
        return pl.BlockSpec((None, *shape), lambda j, t: (t, *(0,) * len(shape)))

    def spec(i, x):
        return pl.BlockSpec(x.shape, lambda j, t: (0,) * x.ndim) if i == shared else row(x.shape[1:])

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec(i, x) for i, x in enumerate(args)],
        out_specs=[row(shape) for shape, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct((grid[1], *shape), dtype) for shape, dtype in outputs],
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name=f"topk_{body.__name__.strip('_')}",
    )(*args)


def _scores(x_ref, column):
    """Scores of those columns, −inf past the last."""
    return plt.load(x_ref.at[column], mask=column < x_ref.shape[0], other=-jnp.inf)


def _keys(x):
    """Scores as integers in their order; `_LOWEST` for −inf."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)
    return jnp.where(x > -jnp.inf, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _LOWEST)


def _score(key):
    """The score of a key."""
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def _bisect(count, low, high, least, most, slack=0):
    """Narrows `low … high` until at least `least` keys are `≥ low` and fewer are `≥ high`, and these are neighbours or
    between `least` and `least + slack` are `≥ low`. `most` are `≥ low` at first, none `≥ high`.

    Returns low and how many are `≥ low` and `≥ high`."""

    def open_(state):
        low, high, n_low, *_ = state
        return (n_low > least + slack) & (high - low != 1)

    def cut(state):
        low, high, n_low, n_high, turn = state
        # First where the counts say, as if keys lay evenly, every other time; then always in the middle, where equal keys
        # do not mislead. The difference is one without sign, for it may not fit.
        span = high - low
        share = (n_low - least).astype(jnp.float32) / (n_low - n_high).astype(jnp.float32)
        even = jnp.clip((span.astype(jnp.float32) * share).astype(jnp.int32), 1, span - 1)
        middle = jax.lax.shift_right_logical(span, jnp.int32(1))
        middle = low + jnp.where((span < 0) | (turn % 2 == 1) | (turn >= 8), middle, even)
        n = count(middle)
        enough = n >= least
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, n, n_low),
            jnp.where(enough, n_high, n),
            turn + 1,
        )

    start = low, high, most, jnp.int32(0), jnp.int32(0)
    low, _, n_low, n_high, _ = jax.lax.while_loop(open_, cut, start)
    return low, n_low, n_high


def _total(x):
    return jnp.sum(x.astype(jnp.int32))


def _range(key):
    """The least key that is there, one more than the largest, and how many are there."""
    low = jnp.min(jnp.where(key == _LOWEST, _LARGEST, key))
    return low, jnp.minimum(jnp.max(key), _INF) + 1, _total(key != _LOWEST)


def _pivot(x_ref, pivot_ref, *, rank):
    """A score that `rank` of the sample reach, or a few more; −inf if fewer are there."""
    key = _keys(_scores(x_ref, jnp.arange(pl.next_power_of_2(x_ref.shape[0]), dtype=jnp.int32)))
    low, high, there = _range(key)
    # Twenty bits are enough to tell two scores apart here; then up to one that is there, which others may equal.
    low, high = low >> _COARSE, (high >> _COARSE) + 1
    low, _, _ = _bisect(lambda t: _total(key >= t << _COARSE), low, high, jnp.int32(rank), there, max(1, rank // 32))
    low = jnp.min(jnp.where(key >= low << _COARSE, key, _LARGEST))
    pivot_ref[0] = jnp.where(there > rank, _score(low), -jnp.inf)


def _count(x_ref, pivot_ref, above_ref, equal_ref, below_ref, *, config):
    """How many columns of each chunk are above the pivot, equal to it, below."""
    j = pl.program_id(0)
    pivot = pivot_ref[0]
    lane = jnp.arange(config.lanes, dtype=jnp.int32)

    def some(i, counts):
        x = _scores(x_ref, j * config.chunk + i * config.lanes + lane)
        # A lane's counts stay below 256: three in a word.
        kind = jnp.where(x > pivot, 1, jnp.where(x == pivot, 1 << 8, 1 << 16))
        return counts + jnp.where(x > -jnp.inf, kind, 0)

    counts = jax.lax.fori_loop(0, config.chunk // config.lanes, some, jnp.zeros(config.lanes, jnp.int32))
    for i, ref in enumerate((above_ref, equal_ref, below_ref)):
        ref[j] = jnp.sum((counts >> (8 * i)) & 255)


def _gather(x_ref, pivot_ref, above_ref, equal_ref, below_ref, best_ref, column_ref, count_ref, *, k, config):
    """Lists what is above the pivot if that is enough; with the first of those equal to it if so they are k; or all."""
    j = pl.program_id(0)
    chunk = jnp.arange(above_ref.shape[0], dtype=jnp.int32)
    above, equal = above_ref[...], equal_ref[...]
    there = above + equal + below_ref[...]
    n_above, n_equal = jnp.sum(above), jnp.sum(equal)
    everything = n_above + n_equal < k
    need = jnp.where(everything | (n_above >= k), 0, k - n_above)
    pivot = jnp.where(everything, -jnp.inf, pivot_ref[0])
    count = jnp.where(everything, jnp.sum(there), n_above + need)
    fits = count <= config.room
    count_ref[0] = jnp.where(fits, count, -1)
    ties = jnp.sum(jnp.where(chunk < j, equal, 0))
    before = jnp.sum(jnp.where(chunk < j, jnp.where(everything, there, above), 0))
    lane = jnp.arange(config.lanes, dtype=jnp.int32)

    def put(place, taken, x, column):
        taken = taken.astype(jnp.int32)
        to = jnp.where(taken > 0, place + jnp.cumsum(taken, axis=0) - 1, _NOWHERE)
        plt.store(best_ref.at[to], x, mask=taken > 0)
        plt.store(column_ref.at[to], column, mask=taken > 0)
        return place + jnp.sum(taken)

    def some(i, place):
        column = j * config.chunk + i * config.lanes + lane
        x = _scores(x_ref, column)
        return put(place, x > pivot, x, column)

    def some_tied(i, carry):
        place, ties = carry
        column = j * config.chunk + i * config.lanes + lane
        x = _scores(x_ref, column)
        tied = ((x == pivot) & (x > -jnp.inf)).astype(jnp.int32)
        first = (tied > 0) & (ties + jnp.cumsum(tied, axis=0) <= need)
        return put(place, (x > pivot) | first, x, column), ties + jnp.sum(tied)

    steps, none = jnp.int32(config.chunk // config.lanes), jnp.int32(0)
    jax.lax.fori_loop(0, jnp.where(fits & (need == 0), steps, none), some, before)
    tied = before + jnp.minimum(ties, need), ties
    jax.lax.fori_loop(0, jnp.where(fits & (need > 0), steps, none), some_tied, tied)


def _finish(x_ref, slot_ref, *refs, k, held, own):
    """The best k of a list, or of a row if there is none: the first `held` stay in registers."""
    *lists, best_ref, out_ref = refs
    columns = x_ref.shape[0]
    lane = jnp.arange(held, dtype=jnp.int32)
    count = jnp.int32(columns)
    if lists:
        list_ref, column_ref, count_ref = lists
        listed = count_ref[0] >= 0
        count = jnp.where(listed, count_ref[0], count)
    blocks = jax.lax.div(count + (held - 1), jnp.int32(held))

    def slots(column, mask):
        return plt.load(slot_ref.at[column], mask=mask, other=NO_SLOT)

    def block(i):
        """Keys of a block, their columns, and what puts equal ones into order."""
        place = i * held + lane
        inside, column = place < count, place
        if lists:
            x = plt.load(x_ref.at[place], mask=inside & jnp.logical_not(listed), other=-jnp.inf)
            x = jnp.where(listed, plt.load(list_ref.at[place], mask=inside & listed, other=-jnp.inf), x)
            column = jnp.where(listed, plt.load(column_ref.at[place], mask=inside & listed, other=0), column)
        else:
            x = _scores(x_ref, place)
        return _keys(x), column, slots(column, inside) if own else column

    first = block(0)
    one_block = held >= columns

    def total(one):
        """How many `one(key, order)` says, of all blocks."""

        def step(i, n):
            key, _, order = block(i)
            return n + _total(one(key, order))

        n = _total(one(first[0], first[2]))
        return n if one_block else jax.lax.fori_loop(1, blocks, step, n)

    low, high, there = _range(first[0])
    if not one_block:
        there = total(lambda key, _: key != _LOWEST)
        alone = blocks <= 1
        low, high = jnp.where(alone, low, _MINUS_INF + 1), jnp.where(alone, high, _INF + 1)
    need = jnp.minimum(there, k)
    low, n_low, n_high = _bisect(lambda t: total(lambda key, _: key >= t), low, high, need, there)
    exact = n_low == need
    # If keys equal to the least one are too many, those of the lowest slots are in.
    last, _, _ = _bisect(
        lambda t: total(lambda key, order: (key == low) & (order <= -t)),
        jnp.int32(-NO_SLOT),
        jnp.int32(1),
        need - n_high,
        n_low - n_high,
    )

    def put(i, place):
        key, column, order = first if i is None else block(i)
        taken = (key != _LOWEST) & ((key > low) | ((key == low) & (exact | (order <= -last))))
        to = place + jnp.cumsum(taken.astype(jnp.int32), axis=0) - 1
        taken &= to < k
        to = jnp.where(taken, to, _NOWHERE)
        plt.store(best_ref.at[to], _score(key), mask=taken)
        plt.store(out_ref.at[to], order if own else slots(column, taken), mask=taken)
        return place + _total(taken)

    rest = jnp.arange(pl.next_power_of_2(k), dtype=jnp.int32)
    empty = (rest >= need) & (rest < k)
    plt.store(best_ref.at[rest], jnp.full(rest.shape, -jnp.inf, jnp.float32), mask=empty)
    plt.store(out_ref.at[rest], jnp.full(rest.shape, NO_SLOT, jnp.int32), mask=empty)
    place = put(None, jnp.int32(0))
    if not one_block:
        jax.lax.fori_loop(1, blocks, put, place)
