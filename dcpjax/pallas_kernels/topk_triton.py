"""The best k columns of each row by radix selection: Triton kernels.

A pass counts one digit of the scores' bits among those that share the digits found so far, chunk by chunk, without
atomics. The next pass finds from the counts which digit the k-th best has. When all digits are known, so is for every
chunk how many columns before it are in, and the columns are written in order.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

_SIGN = -(2**31)
_MINUS_INF_KEY = 0x007FFFFF  # of −inf, after the map to an unsigned order


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """chunk: columns a program, at most 255 times `lanes`, which are taken at once; powers of two.

    digits: bits of each pass, from the highest, 3 to 6 each and 32 together.
    """

    chunk: int = 4096
    lanes: int = 512
    digits: tuple[int, ...] = (6, 6, 5, 5, 5, 5)
    warps: int = 4

    def __post_init__(self):
        if sum(self.digits) != 32 or min(self.digits) < 3:
            raise ValueError(f"digits {self.digits} must be at least 3 bits each and 32 in all")
        if not self.lanes <= self.chunk <= min(255 * self.lanes, 2**15) or self.chunk % self.lanes:
            raise ValueError(
                f"chunk {self.chunk} must be a multiple of lanes {self.lanes}, at most 255 of them, ≤ 32768"
            )

    @classmethod
    def choose(cls, rows: int, columns: int) -> "TopkConfig":
        """For `rows` rows of `columns`: as large chunks as leave every multiprocessor a few programs."""
        chunk = 2**14 if rows * columns >= 2**24 else 2**13
        while chunk > 1024 and rows * pl.cdiv(columns, chunk) < 128:
            chunk //= 2
        # Measured: more lanes want smaller tables of counts, hence more passes.
        if chunk >= 2**13:
            return cls(chunk, 1024, (5, 5, 5, 5, 4, 4, 4), 4 if rows >= 64 else 8)
        return cls(chunk)


def select_triton(
    score: jax.Array, k: int, config: TopkConfig | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Columns `[T, k]` int32 of the best `k` of `score [T, C]` float32, ascending, and their number `[T]` int32.

    Among equals (−0.0 and 0.0 too) the lower column is better. −inf is never in; entries past the number are undefined.
    Raises `ValueError` for k above C.
    """
    rows, columns = score.shape
    if k > columns:
        raise ValueError(f"k {k} must be at most the columns, {columns}")
    if config is None:
        config = TopkConfig.choose(rows, columns)
    # A program looks at all chunks at once, and the backend's arrays are powers of two.
    chunks = pl.next_power_of_2(pl.cdiv(columns, config.chunk))

    def call(body, outputs, *args, **static):
        def kernel(*refs):
            body(*refs, k=k, config=config, **static)

        def row(shape):
            return pl.BlockSpec((None, *shape), lambda j, t: (t, *(0,) * len(shape)))

        return pl.pallas_call(
            kernel,
            grid=(chunks, rows),
            in_specs=[row(x.shape[1:]) for x in args],
            out_specs=[row(shape) for shape in outputs],
            out_shape=[jax.ShapeDtypeStruct((rows, *s), jnp.int32) for s in outputs],
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=2),
            interpret=interpret,
            name=f"topk_{body.__name__.strip('_')}",
        )(*args)

    shift, counts, found, before = 32, None, None, None
    for i, bits in enumerate(config.digits):
        shift -= bits
        outputs = [(chunks, 1 << bits), (2,), (chunks,)]
        if i == 0:
            counts, found, before = call(_first, outputs, score, shift=shift, bits=bits)
        else:
            last = config.digits[i - 1]
            counts, found, before = call(
                _pass, outputs, score, counts, found, before, shift=shift, bits=bits, last=last
            )
    outputs = [(k + config.lanes,), (1,)]
    column, count = call(_compact, outputs, score, counts, found, before, last=config.digits[-1])
    return column[:, :k], count[:, 0]


def _keys(x_ref, column, lane):
    """Bits of `lanes` scores from `column`, whose unsigned order is the scores' order, and which of them exist."""
    inside = column + lane < x_ref.shape[0]
    x = plt.load(x_ref.at[pl.ds(column, lane.shape[0])], mask=inside, other=-jnp.inf)
    x = jnp.where(x == 0.0, 0.0, x)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, ~bits, bits ^ jnp.int32(_SIGN)), inside


def _right(x, n):
    """Unsigned shift by a static number of bits, 32 included."""
    return jnp.zeros_like(x) if n == 32 else jax.lax.shift_right_logical(x, jnp.full_like(x, n))


def _count(x_ref, counts_ref, prefix, shift, bits, config):
    """Counts `[2**bits]` of a digit in this program's chunk, among the keys that begin with `prefix`.

    Every lane counts in fields of 8 bits, four to a word: bin `field · words + word`.
    """
    words = (1 << bits) // 4
    j = pl.program_id(0)
    lane = jnp.arange(config.lanes, dtype=jnp.int32)

    def some(i, acc):
        key, inside = _keys(x_ref, j * config.chunk + i * config.lanes, lane)
        if prefix is not None:
            inside &= _right(key, shift + bits) == prefix
        digit = _right(key, shift) & ((1 << bits) - 1)
        one = jnp.where(inside, 1 << ((digit >> (bits - 2)) * 8), 0)
        word = digit & (words - 1)
        return tuple(a + jnp.where(word == w, one, 0) for w, a in enumerate(acc))

    acc = (jnp.zeros(config.lanes, jnp.int32),) * words
    acc = list(jax.lax.fori_loop(0, config.chunk // config.lanes, some, acc))
    # Joined pair by pair on a new last axis, so that one reduction serves all words.
    while len(acc) > 1:
        half = len(acc) // 2
        acc = [jnp.stack([a, b], axis=-1) for a, b in zip(acc[:half], acc[half:], strict=True)]
    table = acc[0].reshape(config.lanes, words)
    low = jnp.sum(table & 0x00FF00FF, axis=0)
    high = jnp.sum(_right(table, 8) & 0x00FF00FF, axis=0)
    for field, value in enumerate((low & 0xFFFF, high & 0xFFFF, _right(low, 16), _right(high, 16))):
        counts_ref[j, pl.ds(field * words, words)] = value


def _digit(counts_ref, need, last):
    """The digit of the `need`-th best key: itself, how many are better for it, and the bins `[2**last]`."""
    bins = jnp.arange(1 << last, dtype=jnp.int32)
    total = jnp.sum(counts_ref[...], axis=0)
    above = jnp.sum(total, axis=0) - jnp.cumsum(total, axis=0)
    hit = (above < need) & (above + total >= need)
    return jnp.sum(jnp.where(hit, bins, 0)), jnp.sum(jnp.where(hit, above, 0)), bins


def _first(x_ref, counts_ref, found_ref, before_ref, *, k, config, shift, bits):
    j = pl.program_id(0)
    _count(x_ref, counts_ref, None, shift, bits, config)
    before_ref[j] = jnp.int32(0)
    found_ref[0] = jnp.int32(0)
    found_ref[1] = jnp.int32(k)


def _pass(x_ref, last_ref, was_ref, was_before_ref, counts_ref, found_ref, before_ref, *, k, config, shift, bits, last):
    """found: the digits so far, and how many of the keys that begin with them are in. before `[chunks]`: keys of each
    chunk that are certainly in, being larger. All programs of a row write the same `found`."""
    j = pl.program_id(0)
    prefix, need = was_ref[0], was_ref[1]
    digit, better, bins = _digit(last_ref, need, last)
    prefix, need = (prefix << last) | digit, need - better
    _count(x_ref, counts_ref, prefix, shift, bits, config)
    before_ref[j] = was_before_ref[j] + jnp.sum(jnp.where(bins > digit, last_ref[j, :], 0))
    found_ref[0] = prefix
    found_ref[1] = need


def _compact(x_ref, last_ref, was_ref, before_ref, out_ref, count_ref, *, k, config, last):
    """Writes the columns that are in, in order, from where those of earlier chunks end."""
    j = pl.program_id(0)
    prefix, need = was_ref[0], was_ref[1]
    digit, better, bins = _digit(last_ref, need, last)
    key_k, need = (prefix << last) | digit, need - better
    # −inf can only be the least key of all that are in, and is not in itself.
    need = jnp.where(key_k == _MINUS_INF_KEY, 0, need)
    chunk = jnp.arange(last_ref.shape[0], dtype=jnp.int32)
    counts = last_ref[...]
    larger = before_ref[...] + jnp.sum(jnp.where(bins[None, :] > digit, counts, 0), axis=1)
    equal = jnp.sum(jnp.where(bins[None, :] == digit, counts, 0), axis=1)
    ties = jnp.sum(jnp.where(chunk < j, equal, 0))
    place = jnp.sum(jnp.where(chunk < j, larger, 0)) + jnp.minimum(ties, need)
    count_ref[0] = jnp.sum(larger) + need
    lane = jnp.arange(config.lanes, dtype=jnp.int32)

    def some(i, carry):
        place, ties = carry
        column = j * config.chunk + i * config.lanes
        key, inside = _keys(x_ref, column, lane)
        gt = inside & ((key ^ jnp.int32(_SIGN)) > (key_k ^ jnp.int32(_SIGN)))
        eq = (inside & (key == key_k)).astype(jnp.int32)
        count = jnp.sum(eq)
        # Ties are few: their running count is made only where there are any.
        some_ties = (count > 0) & (ties < need)
        tied = jax.lax.cond(
            some_ties,
            lambda: eq * (ties + jnp.cumsum(eq, axis=0) <= need).astype(jnp.int32),
            lambda: jnp.zeros_like(eq),
        )
        taken = gt.astype(jnp.int32) | tied
        # The others go to a tail of their own.
        out_ref[jnp.where(taken > 0, place + jnp.cumsum(taken, axis=0) - 1, k + lane)] = column + lane
        return place + jnp.sum(taken), ties + count

    jax.lax.fori_loop(0, config.chunk // config.lanes, some, (place, ties))
