"""From logits to tokens: penalties and masks, the distribution a request asked for, a draw from it, log-probabilities.

Every function is pure and treats its M rows alike and apart: a row's result is a function of its own logits and
parameters, never of its place in the batch, the batch's size or the step. The noise of a draw is a function of (seed,
choice, position, token id), so the same request gives the same text in any schedule, and a draft that is drawn with the
noise of its position agrees with the target as often as their logits do.

A request may own several rows (k + 1 when drafts are verified). Nothing sorts the vocabulary on the way to a token: the
cuts of top-k and top-p are found by bisection, which needs only sums over the vocabulary and therefore works on any
sharding of it.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.extend.random import threefry2x32_p

_LOWEST = -math.inf

# Streams of noise under one seed: the target's draws (and drafts coupled to them), drafts drawn apart, acceptance.
TARGET, DRAFT, ACCEPT = 0, 1, 2


@struct.dataclass
class SamplingRows:
    """What each of M rows of logits asks for. All arrays; a padding row may hold the values of `neutral`."""

    seed: jax.Array  # [M] uint32, the request's seed
    choice: jax.Array  # [M] int32, which of the request's n choices (0 when n = 1): its own stream under one seed
    temperature: jax.Array  # [M] float32, ≥ 0; 0 is greedy: the arg max, whatever the next three say
    top_k: jax.Array  # [M] int32, keep the k best tokens; 0 keeps all
    top_p: jax.Array  # [M] float32 in (0, 1], keep the smallest best set of at least this mass; 1 keeps all
    min_p: jax.Array  # [M] float32 in [0, 1], drop tokens less probable than this share of the best one; 0 keeps all
    presence: jax.Array  # [M] float32, taken off once from the logit of every token generated before; 0 is off
    frequency: jax.Array  # [M] float32, taken off for each time the token was generated before; 0 is off
    repetition: jax.Array  # [M] float32 > 0, divides positive and multiplies negative logits of tokens seen; 1 is off
    biased: jax.Array  # [M] bool, whether this row's `VocabState.bias` counts; where false it may hold anything
    min_len: jax.Array  # [M] int32, prompt + min_tokens: no stop id is sampled at a position below; 0 is off
    stop_ids: jax.Array  # [M, S] int32, EOS and stop ids, for `min_len` only; -1 is an unused place

    @classmethod
    def neutral(cls, num_rows: int, num_stops: int = 1) -> "SamplingRows":
        """Greedy rows that use nothing. `num_stops`: S, the places for stop ids."""

        def full(value, dtype):
            return jnp.full((num_rows,), value, dtype)

        return cls(
            seed=full(0, jnp.uint32),
            choice=full(0, jnp.int32),
            temperature=full(0, jnp.float32),
            top_k=full(0, jnp.int32),
            top_p=full(1, jnp.float32),
            min_p=full(0, jnp.float32),
            presence=full(0, jnp.float32),
            frequency=full(0, jnp.float32),
            repetition=full(1, jnp.float32),
            biased=full(False, jnp.bool_),
            min_len=full(0, jnp.int32),
            stop_ids=jnp.full((num_rows, num_stops), -1, jnp.int32),
        )

    @property
    def uses_vocab(self) -> jax.Array:
        """[M] bool: the rows whose logits depend on their `VocabState`."""
        return (self.repetition != 1) | (self.presence != 0) | (self.frequency != 0) | self.biased


@struct.dataclass
class VocabState:
    """What penalties and biases know about every token of the (padded) vocabulary, for R rows."""

    counts: jax.Array  # [R, V] int32, times the token was generated before the position to be sampled
    prompt_seen: jax.Array  # [R, V] bool, whether it occurs in the prompt
    bias: jax.Array  # [R, V] float32, added to its logit where the row is `biased`

    @classmethod
    def empty(cls, num_rows: int, vocab: int) -> "VocabState":
        """State of `num_rows` rows that have seen nothing, for `vocab` ids, padding included."""
        shape = (num_rows, vocab)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.bool_), jnp.zeros(shape, jnp.float32))


def _token_ids(x: jax.Array) -> jax.Array:
    """[1, V] int32, the id of each column of [M, V]."""
    return lax.broadcasted_iota(jnp.int32, (1, x.shape[-1]), 1)


# --- what changes the logits --------------------------------------------------------------------------------------


def adjust(
    logits: jax.Array,
    rows: SamplingRows,
    vocab: VocabState | None,
    position: jax.Array,
    vocab_size: int,
    *,
    vocab_row: jax.Array | None = None,
    also: jax.Array | None = None,
) -> jax.Array:
    """The logits that decide: repetition, then presence and frequency, then bias, then masks.

    logits [M, V]; position [M] int32: absolute index that the sampled token will have in its sequence. `vocab_row` [M]
    int32 says which of the R rows of `vocab` a row of logits reads (None: row i reads row i, R = M); the read happens
    only in a step where some row needs it. `also` [M, N] int32: tokens generated after those that `vocab` counts, -1 for
    none (drafts that a row is scored behind). `vocab=None` makes a program that cannot serve rows with `uses_vocab`: they
    would go unpenalised, so the caller keeps them out. Returns float32 [M, V], -inf for masked tokens: the padding of
    the vocabulary (ids ≥ vocab_size) and stop ids at positions below `min_len`.
    """
    x = logits.astype(jnp.float32)
    ids = _token_ids(x)
    if vocab is not None:
        x = lax.cond(jnp.any(rows.uses_vocab), lambda x: _penalise(x, rows, vocab, vocab_row, also), lambda x: x, x)
    early = position < rows.min_len

    def mask_stops(x):
        is_stop = jnp.any(rows.stop_ids[:, :, None] == ids[:, None, :], axis=1)
        return jnp.where(early[:, None] & is_stop, _LOWEST, x)

    x = lax.cond(jnp.any(early), mask_stops, lambda x: x, x)
    return jnp.where(ids < vocab_size, x, _LOWEST)


def restrict(adjusted: jax.Array, allowed: jax.Array, masked: jax.Array) -> jax.Array:
    """-inf for tokens that a grammar forbids.

    adjusted [M, V] float32; allowed [M, ceil(V / 32)] uint32: bit i of word w is token 32·w + i; masked [M] bool: the rows
    for which they count. A step without such rows reads nothing.
    """

    def mask(x):
        words = jnp.repeat(allowed, 32, axis=1)[:, : x.shape[1]]
        bits = words >> (_token_ids(x) % 32).astype(jnp.uint32) & 1
        return jnp.where(masked[:, None] & (bits == 0), _LOWEST, x)

    return lax.cond(jnp.any(masked), mask, lambda x: x, adjusted)


def _penalise(
    x: jax.Array, rows: SamplingRows, vocab: VocabState, vocab_row: jax.Array | None, also: jax.Array | None
) -> jax.Array:
    # Rows that ask for nothing pass through bit for bit: x / 1, x - 0, and no bias.
    if vocab_row is not None:
        vocab = jax.tree.map(lambda a: a[vocab_row], vocab)
    counts = vocab.counts
    if also is not None:
        row = jnp.arange(len(also))[:, None]
        counts = counts.at[row, jnp.where(also < 0, counts.shape[1], also)].add(1, mode="drop")
    repetition = rows.repetition[:, None]
    repeated = jnp.where(x > 0, x / repetition, x * repetition)
    x = jnp.where(vocab.prompt_seen | (counts > 0), repeated, x)
    x = x - rows.frequency[:, None] * counts - rows.presence[:, None] * (counts > 0)
    return jnp.where(rows.biased[:, None], x + vocab.bias, x)


# --- the distribution ---------------------------------------------------------------------------------------------


def log_weights(adjusted: jax.Array, rows: SamplingRows) -> jax.Array:
    """The distribution a row asks for, as logarithms up to a constant: the best token has 0, dropped ones -inf.

    Temperature comes first, then min-p (on those probabilities), then top-k, then top-p of what is left, renormalised.
    "Best" is (value descending, id ascending) throughout, so ties at a cut are kept from the lowest id up. The best
    token is never dropped. A greedy row keeps it alone. adjusted, result: float32 [M, V]; a row of -inf stays so.
    """
    greedy = rows.temperature <= 0
    best = jnp.max(adjusted, axis=-1, keepdims=True)
    temperature = jnp.where(greedy, 1, rows.temperature)[:, None]
    # The best token's logit goes first: dividing large logits would round away the gaps that matter.
    x = (adjusted - jnp.where(best > _LOWEST, best, 0)) / temperature
    x = jnp.where(x >= jnp.log(rows.min_p)[:, None], x, _LOWEST)

    cut = ~greedy & (rows.top_k > 0)

    def top_k(x):
        kept = _best_set(x, jnp.ones_like(x), rows.top_k.astype(jnp.float32))
        return jnp.where(cut[:, None] & ~kept, _LOWEST, x)

    x = lax.cond(jnp.any(cut), top_k, lambda x: x, x)

    nucleus = ~greedy & (rows.top_p < 1)

    def top_p(x):
        weight = jnp.exp(x)
        kept = _best_set(x, weight, rows.top_p * jnp.sum(weight, axis=-1))
        return jnp.where(nucleus[:, None] & ~kept, _LOWEST, x)

    x = lax.cond(jnp.any(nucleus), top_p, lambda x: x, x)
    first = jnp.argmax(adjusted, axis=-1, keepdims=True)
    return jnp.where(greedy[:, None] & (_token_ids(x) != first), _LOWEST, x)


def _best_set(x: jax.Array, weight: jax.Array, need: jax.Array) -> jax.Array:
    """[M, V] bool: the fewest best tokens, by (x descending, id ascending), whose weights sum to at least `need` [M].

    All of a row when its sum is less. Two bisections on bits: the highest value that reaches `need` together with all
    above it, then, among the tokens of exactly that value, the last id that is wanted. Rounded sums of non-negative
    terms grow with their terms, so both are monotone in float32 as well.
    """
    need = jnp.maximum(need, 1e-30)[:, None]  # at least one token
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)  # -0.0 ties with 0.0
    negative = bits >> 31 == 1
    key = jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))  # unsigned, in the order of x
    ids = _token_ids(x)

    def mass(mask):
        return jnp.sum(jnp.where(mask, weight, 0), axis=-1, keepdims=True)

    def raise_value(i, value):
        candidate = value | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(mass(key >= candidate) >= need, candidate, value)

    value = lax.fori_loop(0, 32, raise_value, jnp.zeros_like(need, jnp.uint32))
    width = x.shape[-1].bit_length()

    def raise_id(i, last):
        candidate = last | (1 << (width - 1) >> i)
        short = mass((key > value) | ((key == value) & (ids < candidate))) < need
        return jnp.where(short, candidate, last)

    last = lax.fori_loop(0, width, raise_id, jnp.zeros_like(need, jnp.int32))
    return (key > value) | ((key == value) & (ids <= last))


# --- the draw -----------------------------------------------------------------------------------------------------


def uniform(rows: SamplingRows, position: jax.Array, token_ids: jax.Array, stream: int = TARGET) -> jax.Array:
    """Uniform noise of these tokens: float32 [M, N] in (0, 1), for position [M] int32 and token_ids [N] int32.

    Each number is Threefry-2x32 (Salmon et al., 2011) of key (seed, choice and stream) and counter (position, token id)
    and of nothing else: part of a vocabulary gets the numbers that the whole one gets. The hash's 64 bits make a number
    that is resolved down to 2^-65 at its lower end.
    """
    shape = (position.shape[0], token_ids.shape[0])
    choice = rows.choice.astype(jnp.uint32) | jnp.uint32(stream << 24)
    words = (rows.seed[:, None], choice[:, None], position[:, None], token_ids[None, :])
    high, low = threefry2x32_p.bind(*(jnp.broadcast_to(w.astype(jnp.uint32), shape) for w in words))
    number = (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2**-32) * 2**-32
    return jnp.minimum(number, 1 - 2**-24)  # 2^-65 ≤ number < 1


def noise(rows: SamplingRows, position: jax.Array, token_ids: jax.Array, stream: int = TARGET) -> jax.Array:
    """Gumbel noise, float32 [M, N]: see `uniform`, whose fine end yields the largest noise, where draws are decided."""
    return -jnp.log(-jnp.log1p(-uniform(rows, position, token_ids, stream)))


def sample(adjusted: jax.Array, rows: SamplingRows, position: jax.Array, stream: int = TARGET) -> jax.Array:
    """One token a row: int32 [M], distributed as `log_weights` says; the arg max (lowest id of equals) if greedy.

    adjusted [M, V] float32, from `adjust`; position [M] int32 as there. A step whose rows are all greedy draws nothing.
    A row of -inf yields 0.
    """

    def draw():
        weights = log_weights(adjusted, rows)
        gumbel = noise(rows, position, _token_ids(adjusted)[0], stream)
        return jnp.argmax(weights + gumbel, axis=-1).astype(jnp.int32)

    def best():
        return jnp.argmax(adjusted, axis=-1).astype(jnp.int32)

    return lax.cond(jnp.any(rows.temperature > 0), draw, best)


# --- what is reported ---------------------------------------------------------------------------------------------


def logprobs(
    logits: jax.Array, tokens: jax.Array, vocab_size: int, num: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Natural log-probabilities under the raw distribution: before penalties, temperature and masks.

    logits [M, V] as the network gave them; tokens [M] int32, below vocab_size; `num` static, 0 … vocab_size (which
    lists the whole vocabulary). Returns (chosen [M] float32, of `tokens`; values [M, num] float32 and ids [M, num] int32
    of the best tokens, by (logit descending, id ascending); rank [M] int32, 1-based place of `tokens` in that order).
    The padding of the vocabulary has no probability and is never listed. Raises ValueError for another `num`.
    """
    if not 0 <= num <= vocab_size:
        raise ValueError(f"num={num} log-probabilities of {vocab_size} tokens: ask for 0 to {vocab_size}")
    x = logits.astype(jnp.float32)
    ids = _token_ids(x)
    x = jnp.where(x == 0, 0, x)  # -0.0 ties with 0.0
    x = jnp.where(ids < vocab_size, x, _LOWEST)
    total = jax.nn.logsumexp(x, axis=-1, keepdims=True)
    total = jnp.where(total > _LOWEST, total, 0)
    mine = ids == tokens[:, None]
    chosen = jnp.max(jnp.where(mine, x, _LOWEST), axis=-1, keepdims=True)
    better = (x > chosen) | ((x == chosen) & (ids < tokens[:, None]))
    rank = 1 + jnp.sum(better, axis=-1, dtype=jnp.int32)
    values, best = lax.top_k(x, num)
    return (chosen - total)[:, 0], values - total, best.astype(jnp.int32), rank
