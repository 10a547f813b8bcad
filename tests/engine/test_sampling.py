"""Sampling against a plain numpy oracle, and what must not matter to it: batch, order, slice, sharding."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from dcpjax import sampling
from dcpjax.mesh import make_plan
from dcpjax.sampling import SamplingRows, VocabState

# One shape for nearly everything, so that little is compiled: 4 rows, 24 columns of which the last 3 are padding.
ROWS, VOCAB, PADDED = 4, 21, 24

adjust = jax.jit(sampling.adjust, static_argnames="vocab_size")
sample = jax.jit(sampling.sample)
log_weights = jax.jit(sampling.log_weights)
logprobs = jax.jit(sampling.logprobs, static_argnames=("vocab_size", "num"))
noise = jax.jit(sampling.noise)


def rows_of(num_rows=ROWS, num_stops=2, **fields):
    """Neutral rows with some fields replaced; a scalar is the same for every row."""
    rows = SamplingRows.neutral(num_rows, num_stops)
    return rows.replace(
        **{
            name: jnp.broadcast_to(jnp.asarray(value, getattr(rows, name).dtype), getattr(rows, name).shape)
            for name, value in fields.items()
        }
    )


def logits_of(seed, shape=(ROWS, PADDED), ties=False):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2
    return np.round(x) if ties else x


# --- oracle -------------------------------------------------------------------------------------------------------


def oracle_adjust(logits, rows, vocab, position, vocab_size):
    x = np.array(logits, np.float32)
    for m in range(x.shape[0]):
        for t in range(x.shape[1]):
            count = np.float32(vocab.counts[m, t])
            if vocab.prompt_seen[m, t] or count:
                x[m, t] = x[m, t] / rows.repetition[m] if x[m, t] > 0 else x[m, t] * rows.repetition[m]
            x[m, t] -= rows.frequency[m] * count
            if count:
                x[m, t] -= rows.presence[m]
            if rows.biased[m]:
                x[m, t] += vocab.bias[m, t]
            if t >= vocab_size or (position[m] < rows.min_len[m] and t in rows.stop_ids[m]):
                x[m, t] = -np.inf
    return x


def best_first(x):
    return sorted(range(len(x)), key=lambda t: (-x[t], t))


def check_kept(logits, kept, temperature, top_k, top_p, min_p):
    """The kept set obeys min-p, then top-k, then top-p; only a top-p or min-p bound within 1e-5 may go either way."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    order = best_first(logits)
    order = [t for t in order if logits[t] > -np.inf]
    kept = set(np.flatnonzero(kept).tolist())
    assert kept == set(order[: len(kept)])  # always the best ones, lowest ids of a tie
    assert kept
    allowed = [t for t in order if p[t] >= min_p * (1 - 1e-5)]
    if top_k > 0:
        allowed = allowed[:top_k]
    mass = np.cumsum(p[allowed]) / p[allowed].sum()
    assert len(kept) <= len(allowed)
    if top_p == 1:
        certain = [t for t in allowed if p[t] >= min_p * (1 + 1e-5)]
        assert len(kept) >= len(certain)
    else:
        assert mass[len(kept) - 1] >= top_p - 1e-5
        assert len(kept) == 1 or mass[len(kept) - 2] < top_p + 1e-5


def threefry(key, counter):
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011)."""
    mask = 0xFFFFFFFF
    schedule = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = (counter[0] + key[0]) & mask, (counter[1] + key[1]) & mask
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = (x + y) & mask
            y = ((y << r | y >> (32 - r)) & mask) ^ x
        x = (x + schedule[(block + 1) % 3]) & mask
        y = (y + schedule[(block + 2) % 3] + block + 1) & mask
    return x, y


# --- what changes the logits --------------------------------------------------------------------------------------


def random_vocab(seed, num_rows=ROWS, padded=PADDED):
    rng = np.random.default_rng(seed)
    shape = (num_rows, padded)
    counts = np.where(rng.random(shape) < 0.3, rng.integers(1, 4, shape), 0).astype(np.int32)
    bias = np.where(rng.random(shape) < 0.3, rng.uniform(-100, 100, shape), 0).astype(np.float32)
    return VocabState(jnp.asarray(counts), jnp.asarray(rng.random(shape) < 0.3), jnp.asarray(bias))


per_row = functools.partial(st.lists, min_size=ROWS, max_size=ROWS)
penalty = st.sampled_from([0.0, 0.0, -2.0, 0.5, 1.25, 2.0])


@given(
    seed=st.integers(0, 10_000),
    presence=per_row(penalty),
    frequency=per_row(penalty),
    repetition=per_row(st.sampled_from([1.0, 1.0, 0.5, 1.3, 4.0])),
    biased=per_row(st.booleans()),
    min_len=per_row(st.integers(0, 12)),
    position=per_row(st.integers(0, 12)),
    stops=per_row(st.lists(st.integers(-1, VOCAB - 1), min_size=2, max_size=2)),
)
def test_adjust_equals_oracle(seed, presence, frequency, repetition, biased, min_len, position, stops):
    rows = rows_of(
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        biased=biased,
        min_len=min_len,
        stop_ids=stops,
    )
    logits, vocab, position = logits_of(seed), random_vocab(seed), np.array(position, np.int32)
    got = adjust(logits, rows, vocab, position, vocab_size=VOCAB)
    want = oracle_adjust(logits, *jax.tree.map(np.asarray, (rows, vocab)), position, VOCAB)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5)


def test_rows_that_ask_for_nothing_pass_bit_for_bit():
    logits, vocab = logits_of(1), random_vocab(1)
    rows = rows_of(repetition=[1, 2, 1, 1], presence=[0, 0, 1, 0], biased=[False, False, False, True])
    got = np.asarray(adjust(logits, rows, vocab, np.zeros(ROWS, np.int32), vocab_size=VOCAB))
    assert (got[0, :VOCAB] == logits[0, :VOCAB]).all()
    for m in (1, 2, 3):
        assert (got[m, :VOCAB] != logits[m, :VOCAB]).any()


def test_repetition_counts_prompt_and_output_but_presence_and_frequency_only_output():
    logits = np.tile(np.array([2.0, -2.0, 2.0, -2.0] + [0.0] * 20, np.float32), (ROWS, 1))
    vocab = VocabState.empty(ROWS, PADDED)
    vocab = vocab.replace(prompt_seen=vocab.prompt_seen.at[:, :2].set(True), counts=vocab.counts.at[:, 2:4].set(3))
    position = np.zeros(ROWS, np.int32)
    got = adjust(logits, rows_of(repetition=4), vocab, position, vocab_size=VOCAB)
    np.testing.assert_array_equal(got[0, :5], [0.5, -8, 0.5, -8, 0])
    got = adjust(logits, rows_of(presence=1, frequency=0.5), vocab, position, vocab_size=VOCAB)
    np.testing.assert_array_equal(got[0, :5], [2, -2, -0.5, -4.5, 0])


def test_vocab_row_reads_the_state_of_the_request():
    """Several rows of one request (drafts under verification) read one row of the state, in any order."""
    logits, vocab = logits_of(2), random_vocab(2, num_rows=3)
    rows, position = rows_of(presence=1.5, repetition=1.2, biased=True), np.zeros(ROWS, np.int32)
    row = np.array([2, 0, 2, 2], np.int32)
    got = adjust(logits, rows, vocab, position, vocab_size=VOCAB, vocab_row=row)
    want = adjust(logits, rows, jax.tree.map(lambda a: a[row], vocab), position, vocab_size=VOCAB)
    chex.assert_trees_all_equal(got, want)


def test_stop_ids_are_masked_below_min_len_only():
    logits = np.zeros((ROWS, PADDED), np.float32)
    logits[:, 5] = 10
    rows = rows_of(min_len=8, stop_ids=[[5, -1], [-1, 5], [6, -1], [5, 6]])
    got = np.asarray(adjust(logits, rows, None, np.array([7, 7, 7, 8], np.int32), vocab_size=VOCAB))
    masked = {(m, t) for m, t in zip(*np.nonzero(got == -np.inf), strict=True) if t < VOCAB}
    assert masked == {(0, 5), (1, 5), (2, 6)}
    tokens = np.asarray(sample(got, rows, np.array([7, 7, 7, 8], np.int32)))
    np.testing.assert_array_equal(tokens, [0, 0, 5, 5])


def test_padding_is_never_sampled_nor_listed():
    logits = np.zeros((ROWS, PADDED), np.float32)
    logits[:, VOCAB:] = 1e4
    vocab = VocabState.empty(ROWS, PADDED)
    vocab = vocab.replace(bias=vocab.bias.at[:, VOCAB:].set(100.0))
    for seed in range(20):
        rows = rows_of(temperature=[0, 1, 50, 1], top_k=[0, 0, 0, 24], seed=seed, biased=True)
        position = np.arange(ROWS, dtype=np.int32)
        adjusted = adjust(logits, rows, vocab, position, vocab_size=VOCAB)
        assert (np.asarray(sample(adjusted, rows, position)) < VOCAB).all()
    chosen, values, ids, _ = logprobs(logits, np.zeros(ROWS, np.int32), vocab_size=VOCAB, num=VOCAB)
    assert np.asarray(ids).max() == VOCAB - 1
    np.testing.assert_allclose(chosen, -np.log(VOCAB), rtol=1e-6)
    np.testing.assert_allclose(values, -np.log(VOCAB), rtol=1e-6)


# --- the distribution ---------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10_000),
    ties=st.booleans(),
    temperature=per_row(st.sampled_from([0.05, 0.7, 1.0, 3.0])),
    top_k=per_row(st.one_of(st.just(0), st.integers(1, PADDED + 3))),
    top_p=per_row(st.one_of(st.just(1.0), st.floats(0.001, 0.999))),
    min_p=per_row(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
)
def test_kept_tokens_and_their_weights_equal_oracle(seed, ties, temperature, top_k, top_p, min_p):
    logits = logits_of(seed, ties=ties)
    logits[:, VOCAB:] = -np.inf
    got = np.asarray(log_weights(logits, rows_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)))
    top_p, min_p = np.float32(top_p), np.float32(min_p)
    for m in range(ROWS):
        kept = got[m] > -np.inf
        check_kept(logits[m], kept, np.float32(temperature[m]), top_k[m], top_p[m], min_p[m])
        want = (logits[m] - logits[m].max()) / np.float32(temperature[m])
        np.testing.assert_allclose(got[m][kept], want[kept], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, [1, 3]),  # of three equal tokens the lowest ids
        ({"top_k": 4}, [0, 1, 3, 4]),
        ({"top_p": 0.5}, [1, 3]),  # masses 0.25 0.25 0.25 …: exactly half is enough
        ({"top_p": 0.500001}, [1, 3, 4]),
        ({"top_p": 1e-20}, [1]),
        ({"top_p": 1e-40}, [1]),  # below the smallest normal number: still one token
        ({"min_p": 0.5}, [0, 1, 3, 4]),
        ({"min_p": 0.5, "top_k": 2}, [1, 3]),
        ({"top_k": 3, "top_p": 0.66}, [1, 3]),  # top-p is of what top-k left: 1/3 each
        ({"top_k": 3, "top_p": 0.67}, [1, 3, 4]),
        ({"temperature": 0.0, "top_k": 3}, [1]),
        ({}, [0, 1, 2, 3, 4]),
    ],
)
def test_order_and_ties_of_the_cuts(fields, kept):
    p = np.zeros(PADDED)
    p[:5] = [1 / 8, 1 / 4, 1 / 8, 1 / 4, 1 / 4]
    if "min_p" in fields:
        p[2] = 1 / 16
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log2(p).astype(np.float32), (ROWS, 1))
    # In base 2 the logits are whole and the temperature 1 / ln 2 gives back p.
    got = log_weights(logits, rows_of(**({"temperature": 1 / np.log(2)} | fields)))
    for m in range(ROWS):
        assert np.flatnonzero(np.asarray(got[m]) > -np.inf).tolist() == kept


def test_zeros_of_either_sign_tie():
    logits = np.full((ROWS, PADDED), -1, np.float32)
    logits[:, 3], logits[:, 7] = -0.0, 0.0
    kept = np.asarray(log_weights(logits, rows_of(temperature=1, top_k=1))) > -np.inf
    assert (np.argmax(kept, axis=-1) == 3).all() and (kept.sum(axis=-1) == 1).all()
    _, _, ids, rank = logprobs(logits, np.full(ROWS, 7, np.int32), vocab_size=VOCAB, num=2)
    assert np.asarray(ids).tolist() == [[3, 7]] * ROWS and np.asarray(rank).tolist() == [2] * ROWS


def test_a_neighbours_cut_does_not_touch_a_row():
    logits = logits_of(5)
    alone = log_weights(logits, rows_of(temperature=0.8))
    beside = log_weights(logits, rows_of(temperature=0.8, top_k=[0, 2, 0, 0], top_p=[1, 1, 0.3, 1]))
    np.testing.assert_array_equal(alone[0], beside[0])
    np.testing.assert_array_equal(alone[3], beside[3])
    assert np.isinf(beside[1]).sum() == PADDED - 2


# --- the draw -----------------------------------------------------------------------------------------------------


def test_noise_is_gumbel_of_threefry():
    assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)  # the published vector
    rows = rows_of(seed=[0, 1, 2**32 - 1, 77], choice=[0, 0, 3, 1])
    position, ids = np.array([0, 5, 1_000_000, 9], np.int32), np.array([0, 1, 154_879], np.int32)
    got = noise(rows, position, ids)
    for m in range(ROWS):
        for n in range(len(ids)):
            key = int(rows.seed[m]), int(rows.choice[m])
            high, low = threefry(key, (int(position[m]), int(ids[n])))
            uniform = ((high << 32) + low + 0.5) / 2**64
            np.testing.assert_allclose(got[m, n], -np.log(-np.log1p(-uniform)), rtol=1e-5, atol=1e-6)


def test_noise_is_finite_and_fine_at_both_ends():
    """Counters whose first word is among the highest (rounds to 1 in float32) and the lowest of 140 million."""
    for position, token, high in ((173, 51_033, 0xFFFFFFC1), (839, 29_907, 45)):
        assert threefry((0, 0), (position, token))[0] == high
        got = noise(rows_of(1, 1), np.array([position], np.int32), np.array([token], np.int32))[0, 0]
        uniform = min((high + 0.5) / 2**32, 1 - 2**-24)
        np.testing.assert_allclose(got, -np.log(-np.log1p(-uniform)), atol=0.02)


def test_noise_does_not_depend_on_batch_order_or_slice():
    seed = np.arange(9, dtype=np.uint32) * 1_234_567
    rows, position = rows_of(9, seed=seed, choice=np.arange(9) % 3), np.arange(9, dtype=np.int32) * 31
    ids = np.arange(300, dtype=np.int32)
    whole = np.asarray(noise(rows, position, ids))
    assert np.isfinite(whole).all() and len(np.unique(whole)) == whole.size
    for part in (slice(0, 1), slice(17, 150), slice(150, 300)):
        np.testing.assert_array_equal(noise(rows, position, ids[part]), whole[:, part])
    order = np.random.default_rng(0).permutation(9)[:5]
    some = jax.tree.map(lambda a: a[order], rows)
    np.testing.assert_array_equal(noise(some, position[order], ids), whole[order])


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_each_key_word_makes_its_own_stream(field):
    rows, position = rows_of(2, seed=7, choice=1), np.full(2, 40, np.int32)
    if field == "position":
        position[1] += 1
    else:
        rows = rows.replace(**{field: getattr(rows, field).at[1].add(1)})
    first, second = np.asarray(noise(rows, position, np.arange(2000, dtype=np.int32)))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08
    shift = np.asarray(noise(rows_of(2, seed=7, choice=1), np.full(2, 40, np.int32), np.arange(2000, dtype=np.int32)))
    np.testing.assert_array_equal(shift[0], shift[1])  # equal words, equal noise


def chi_square(tokens, p):
    counts = np.bincount(tokens, minlength=len(p))
    assert (counts[p == 0] == 0).all()
    expected = p[p > 0] * len(tokens)
    return ((counts[p > 0] - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("stream", ["seed", "choice", "position"])
def test_draws_follow_the_distribution(stream):
    n = 6000
    words = {"seed": 3, "choice": 0, "position": 11} | {stream: np.arange(n)}
    logits = np.random.default_rng(3).normal(size=12).astype(np.float32) * 0.7
    position = np.broadcast_to(np.asarray(words.pop("position"), np.int32), (n,))
    rows = rows_of(n, temperature=0.8, **words)
    p = np.exp(logits.astype(np.float64) / np.float32(0.8))
    p /= p.sum()
    tokens = np.asarray(sample(np.tile(logits, (n, 1)), rows, position))
    assert chi_square(tokens, p) < 31.3  # 11 degrees of freedom, one in a thousand; the draw is fixed
    assert chi_square(tokens, np.roll(p, 1)) > 1000  # the check can fail

    order = best_first(logits)
    p[order[5:]] = 0
    kept = np.cumsum(p[order[:5]]) / p.sum() < 0.8
    p[[t for t, before in zip(order[1:5], kept[:-1], strict=True) if not before]] = 0
    cut = sample(np.tile(logits, (n, 1)), rows.replace(top_k=jnp.full(n, 5), top_p=jnp.full(n, 0.8)), position)
    assert 1 < (p > 0).sum() < 5
    assert chi_square(np.asarray(cut), p / p.sum()) < 18.5  # at most 4 degrees of freedom


def test_sample_is_the_arg_max_of_weights_plus_noise():
    logits = logits_of(8)
    rows, position = rows_of(temperature=[0.5, 1, 2, 0], seed=[1, 2, 3, 4], top_k=[0, 5, 0, 0]), np.arange(ROWS)
    position = position.astype(np.int32)
    score = np.asarray(log_weights(logits, rows)) + np.asarray(noise(rows, position, np.arange(PADDED)))
    np.testing.assert_array_equal(sample(logits, rows, position), score.argmax(axis=-1))


@given(seed=st.integers(0, 10_000), ties=st.booleans(), position=st.integers(0, 2**20))
def test_greedy_and_top_k_1_take_the_lowest_best_id(seed, ties, position):
    logits = logits_of(seed, ties=ties)
    rows = rows_of(temperature=[0, 2, 0, 5], top_k=[0, 1, 3, 1], top_p=[1, 1, 0.2, 0.9], seed=seed)
    got = sample(logits, rows, np.full(ROWS, position, np.int32))
    np.testing.assert_array_equal(got, logits.argmax(axis=-1))  # numpy's argmax is the first, too
    np.testing.assert_array_equal(sample(logits, rows.replace(temperature=jnp.zeros(ROWS)), np.zeros(ROWS)), got)


@given(seed=st.integers(0, 10_000), data=st.data())
def test_a_request_samples_the_same_in_any_batch(seed, data):
    """Its place, its neighbours and the batch's size do not matter; here the batch holds 2 … 4 requests in any order."""
    rng = np.random.default_rng(seed)
    rows = rows_of(
        temperature=rng.choice([0, 0.7, 1.5], ROWS),
        top_k=rng.choice([0, 3, 9], ROWS),
        top_p=rng.choice([1, 0.8], ROWS),
        min_p=rng.choice([0, 0.05], ROWS),
        seed=rng.integers(0, 2**32, ROWS, dtype=np.uint32),
    )
    logits, position = logits_of(seed), rng.integers(0, 5000, ROWS).astype(np.int32)
    whole = np.asarray(sample(logits, rows, position))
    order = np.array(data.draw(st.permutations(range(ROWS))))[: data.draw(st.integers(2, ROWS))]
    got = sample(logits[order], jax.tree.map(lambda a: a[order], rows), position[order])
    np.testing.assert_array_equal(got, whole[order])


def test_rows_of_minus_infinity_are_safe():
    logits = np.full((ROWS, PADDED), -np.inf, np.float32)
    logits[3] = logits_of(9)[3]
    rows = rows_of(temperature=[0, 1, 1, 1], top_k=[0, 3, 0, 0], top_p=[1, 1, 0.5, 1], min_p=0.1, seed=5)
    position = np.zeros(ROWS, np.int32)
    weights = np.asarray(log_weights(logits, rows))
    assert not np.isnan(weights).any() and np.isneginf(weights[:3]).all()
    tokens = np.asarray(sample(logits, rows, position))
    assert tokens[:3].tolist() == [0, 0, 0] and logits[3, tokens[3]] > logits[3].min()
    for out in logprobs(logits, tokens, vocab_size=VOCAB, num=3):
        assert not np.isnan(np.asarray(out, np.float32)).any()


# --- what is reported ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [0, 1, 5, VOCAB])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_equal_oracle(num, ties):
    logits = logits_of(13, ties=ties)
    logits[0, 4] = -np.inf
    tokens = np.array([4, 0, VOCAB - 1, int(logits[3, :VOCAB].argmax())], np.int32)
    chosen, values, ids, rank = logprobs(logits, tokens, vocab_size=VOCAB, num=num)
    chex.assert_shape((values, ids), (ROWS, num))
    for m in range(ROWS):
        x = logits[m, :VOCAB].astype(np.float64)
        want = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        order = best_first(logits[m, :VOCAB])
        assert np.asarray(ids[m]).tolist() == order[:num]
        np.testing.assert_allclose(values[m], want[order[:num]], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(chosen[m], want[tokens[m]], rtol=1e-5, atol=1e-6)
        assert order[int(rank[m]) - 1] == tokens[m]
    assert int(rank[3]) == 1 and int(rank[0]) == VOCAB
    chex.assert_type((chosen, values, ids, rank), (jnp.float32, jnp.float32, jnp.int32, jnp.int32))


@pytest.mark.parametrize("num", [-1, VOCAB + 1])
def test_logprobs_refuses_more_than_the_vocabulary(num):
    with pytest.raises(ValueError, match="ask for 0 to 21"):
        logprobs(np.zeros((ROWS, PADDED), np.float32), np.zeros(ROWS, np.int32), vocab_size=VOCAB, num=num)


# --- sharding -----------------------------------------------------------------------------------------------------


def test_a_sharded_vocabulary_gives_the_same_answers():
    plan = make_plan(4, dcp=2)
    logits, vocab = logits_of(21), random_vocab(21)
    rows = rows_of(
        temperature=[0, 0.7, 1, 1.5],
        top_k=[0, 6, 0, 0],
        top_p=[1, 0.9, 0.7, 1],
        repetition=1.2,
        presence=0.5,
        min_len=9,
        stop_ids=[[1, 20]] * ROWS,
        seed=range(ROWS),
    )
    position = np.full(ROWS, 8, np.int32)

    def step(logits, rows, vocab, position):
        adjusted = sampling.adjust(logits, rows, vocab, position, VOCAB)
        tokens = sampling.sample(adjusted, rows, position)
        return adjusted, tokens, sampling.logprobs(logits, tokens, VOCAB, 5)

    want = jax.jit(step)(logits, rows, vocab, position)
    sharding = plan.sharding(None, "vocab")
    everywhere = NamedSharding(plan.mesh, PartitionSpec())
    args = jax.device_put((logits, rows, vocab, position), (sharding, everywhere, sharding, everywhere))
    got = jax.jit(step)(*args)
    assert not args[0].is_fully_replicated
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    chex.assert_trees_all_close(jax.device_get(got[2]), jax.device_get(want[2]), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[2][2], want[2][2])
