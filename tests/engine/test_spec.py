"""Which drafts are kept: the rules of acceptance alone, without a network."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax import sampling
from dcpjax import step as steps
from dcpjax.errors import ConfigError
from dcpjax.sampling import DRAFT, SamplingRows
from dcpjax.spec import KEYS, MOST_DRAFTS, Rows, Speculation, verify

VOCAB = 12

check = jax.jit(verify, static_argnames=("spec", "vocab_size"))


def rows_of(drafts, *, vocab=VOCAB, weights=None, valid=None, start=7, limit=100, credit=0.0, **fields):
    """Decode rows in row slots 0 … B − 1, sampled as `fields` say."""
    drafts = jnp.asarray(drafts, jnp.int32)
    size, k = drafts.shape
    one = jnp.ones(size, jnp.int32)
    neutral = SamplingRows.neutral(size)
    sampled = neutral.replace(
        **{
            name: jnp.broadcast_to(jnp.asarray(value, getattr(neutral, name).dtype), getattr(neutral, name).shape)
            for name, value in fields.items()
        }
    )
    return Rows(
        row=jnp.arange(size),
        start=one * start,
        num_tokens=one * (k + 1),
        first=jnp.arange(size) * (k + 1),
        last=jnp.arange(size) * (k + 1) + k,
        decode=one > 0,
        emit=one > 0,
        limit=one * limit,
        sampling=sampled,
        drafts=drafts,
        num_drafts=one * k if valid is None else jnp.asarray(valid, jnp.int32),
        weights=jnp.zeros((size, 0, vocab)) if weights is None else weights,
        credit=jnp.broadcast_to(jnp.float32(credit), (size,)),
        masked=one < 0,
    )


def state_of(rows, vocab=VOCAB, spec=None):
    return steps.empty_state(len(rows.row), vocab, spec)


def logits_of(seed, size, k, vocab=VOCAB):
    return np.random.default_rng(seed).normal(size=(size, k + 1, vocab)).astype(np.float32) * 2


def best(logits):
    return np.argmax(logits, axis=-1)


# --- coupled ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(0, 3), st.data())
def test_a_greedy_draft_is_kept_iff_the_target_says_the_same(seed, good, data):
    """The first wrong draft ends the run; a token of the target's own follows it."""
    k, logits = 3, logits_of(seed, 2, 3)
    want = best(logits)
    drafts = want[:, :k].copy()
    if good < k:
        drafts[0, good] = (drafts[0, good] + data.draw(st.integers(1, VOCAB - 1))) % VOCAB
    tokens, accepted, _ = check(logits, rows_of(drafts), state_of(rows_of(drafts)), Speculation(k), VOCAB)
    assert accepted.tolist() == [good + 1, k + 1]
    assert tokens[0, : good + 1].tolist() == want[0, : good + 1].tolist()
    assert tokens[1].tolist() == want[1].tolist()


def test_coupled_tokens_are_those_drawn_without_drafts():
    """Whatever the drafts are, every token that counts is the sample of its own position."""
    k, size = 3, 64
    logits = logits_of(1, size, k)
    drawn = sampling.sample(
        jnp.asarray(logits.reshape(-1, VOCAB)),
        jax.tree.map(lambda x: jnp.repeat(x, k + 1, 0), rows_of(np.zeros((size, k)), temperature=1, seed=5).sampling),
        jnp.tile(8 + jnp.arange(k + 1), size),
    ).reshape(size, k + 1)
    drafts = np.array(drawn[:, :k])
    drafts[::2, 1] = (drafts[::2, 1] + 1) % VOCAB
    rows = rows_of(drafts, temperature=1, seed=5)
    tokens, accepted, _ = check(logits, rows, state_of(rows), Speculation(k), VOCAB)
    assert accepted.tolist() == [2, k + 1] * (size // 2)
    for got, want, count in zip(tokens, drawn, accepted, strict=True):
        assert got[:count].tolist() == want[:count].tolist()


def test_drafts_that_are_not_real_are_never_kept():
    """A row may have fewer drafts than the step verifies, even if what lies there happens to be right."""
    logits = logits_of(2, 4, 3)
    drafts = best(logits)[:, :3]
    for spec in (Speculation(3), Speculation(3, pin=4.0)):
        rows = rows_of(drafts, valid=[0, 1, 2, 3], credit=3)
        _, accepted, _ = check(logits, rows, state_of(rows), spec, VOCAB)
        assert accepted.tolist() == [1, 2, 3, 4], spec


def test_a_run_ends_at_the_limit():
    logits = logits_of(3, 1, 3)
    drafts = best(logits)[:, :3]
    for limit, want in ((8, 0), (9, 1), (10, 2), (12, 4), (50, 4)):
        rows = rows_of(drafts, start=7, limit=limit)
        _, accepted, _ = check(logits, rows, state_of(rows), Speculation(3), VOCAB)
        assert accepted.tolist() == [want], limit


def test_a_chunk_brings_one_token_and_no_draft_is_kept():
    logits = np.repeat(logits_of(4, 1, 0), 4, axis=1)  # every place scores the chunk's last token
    rows = rows_of(best(logits)[:, :3])
    rows = dataclasses.replace(rows, decode=jnp.zeros(1, bool))
    tokens, accepted, _ = check(logits, rows, state_of(rows), Speculation(3), VOCAB)
    assert accepted.tolist() == [1] and tokens[0, 0] == best(logits)[0, 0]
    rows = dataclasses.replace(rows, emit=jnp.zeros(1, bool))
    assert check(logits, rows, state_of(rows), Speculation(3), VOCAB)[1].tolist() == [0]


# --- what changes the logits ----------------------------------------------------------------------------------------


def test_penalties_count_the_drafts_before_each_place():
    """Place j is scored as if drafts 0 … j − 1 had been generated: the same as one token after another."""
    k, logits = 3, logits_of(5, 1, 3)
    fields = {"presence": 1.5, "frequency": 0.5, "repetition": 1.3}
    counts = np.zeros(VOCAB, np.int32)
    counts[[1, 4]] = 2
    one, want = rows_of(np.zeros((1, 0)), **fields), []
    state = state_of(one)
    for j in range(k + 1):
        vocab = state.vocab.replace(counts=jnp.asarray(counts)[None])
        adjusted = sampling.adjust(logits[:, j], one.sampling, vocab, jnp.array([8 + j]), VOCAB)
        want.append(int(jnp.argmax(adjusted)))
        counts[want[-1]] += 1
    assert want != best(logits)[0].tolist()  # the penalties do something
    counts[want] -= 1
    rows = rows_of([want[:k]], **fields)
    state = state_of(rows)
    state = state.replace(vocab=state.vocab.replace(counts=jnp.asarray(counts)[None]))
    tokens, accepted, _ = check(logits, rows, state, Speculation(k), VOCAB)
    assert tokens[0].tolist() == want and accepted.tolist() == [k + 1]


def test_min_tokens_ends_inside_a_run():
    """A stop id is masked at places before `min_len` and allowed from there on."""
    logits = np.zeros((1, 4, VOCAB), np.float32)
    logits[..., 9], logits[..., 5] = 5, 3
    rows = rows_of([[5, 5, 9]], min_len=10, stop_ids=[[9]])  # positions 8, 9 are before it, 10 and 11 are not
    tokens, accepted, _ = check(logits, rows, state_of(rows), Speculation(3), VOCAB)
    assert tokens[0].tolist() == [5, 5, 9, 9] and accepted.tolist() == [4]


def test_bias_reaches_every_place():
    logits = logits_of(6, 1, 2)
    rows = rows_of([[3, 3]], biased=True)
    state = state_of(rows)
    state = state.replace(vocab=state.vocab.replace(bias=jnp.zeros((1, VOCAB)).at[0, 3].set(100)))
    assert check(logits, rows, state, Speculation(2), VOCAB)[0].tolist() == [[3, 3, 3]]


# --- grammars -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_forbids_never_comes(acceptance, temperature):
    """Row by row and place by place; a draft that is forbidden ends the run there. Rows without one are as ever."""
    k, size = 3, 200
    rng, logits, spec = np.random.default_rng(5), logits_of(6, size, k), Speculation(k, acceptance=acceptance)
    drafts = best(logits)[:, :k].astype(np.int32)
    weights = jnp.asarray(logits[:, :k]) if acceptance == "rejection" else None
    rows = rows_of(drafts, temperature=temperature, seed=3, weights=weights)
    masked = np.arange(size) % 2 == 0
    may = rng.random((size, k + 1, VOCAB)) < 0.7
    may[..., 0] = True  # never nothing
    words = np.zeros((size, k + 1, 1), np.uint32)
    words[..., 0] = (may * (1 << np.arange(VOCAB))).sum(-1)
    bound = dataclasses.replace(rows, masked=jnp.asarray(masked))
    state = state_of(rows, spec=spec)
    tokens, accepted, _ = check(logits, bound, state, spec, VOCAB, jnp.asarray(words))
    free, free_accepted, _ = check(logits, rows, state, spec, VOCAB)
    assert accepted.tolist() != free_accepted.tolist()
    for i in range(size):
        count = int(accepted[i])
        if not masked[i]:
            assert count == free_accepted[i] and tokens[i, :count].tolist() == free[i, :count].tolist()
            continue
        assert all(may[i, j, tokens[i, j]] for j in range(count))
        forbidden = [j for j in range(k) if not may[i, j, drafts[i, j]]]
        assert not forbidden or count <= forbidden[0] + 1
        if temperature == 0:
            own = np.where(may[i], logits[i], -np.inf).argmax(-1)
            assert tokens[i, :count].tolist() == own[:count].tolist()


# --- rejection ------------------------------------------------------------------------------------------------------

SAMPLES = 20_000
BINS = 6


def chain(seed):
    """Logits `[V, V]` of the next token given the last: a language that a test can sum over."""
    return np.random.default_rng(seed).normal(size=(BINS, BINS)).astype(np.float32) * 1.5


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def chi_square(counts, expected):
    """The statistic in standard deviations from its mean, over cells that expect at least 5."""
    counts, expected = counts.ravel(), expected.ravel()
    cells = expected >= 5
    freedom = cells.sum() - 1
    value = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    return (value - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("cut", ["temperature", "top_k"])
def test_rejection_samples_the_exact_distribution(k, cut):
    """20,000 runs of k drafts from another distribution: the joint counts of all tokens are the target's own.

    Whatever the run did not decide is completed by the target, so that every sample has k + 1 tokens.
    """
    target, draft = chain(1), chain(2)
    fields = {"temperature": 0.7} if cut == "temperature" else {"temperature": 1.0, "top_k": 4}
    rows = rows_of(np.zeros((SAMPLES, k)), vocab=BINS, **fields)
    rows = dataclasses.replace(rows, sampling=rows.sampling.replace(seed=jnp.arange(SAMPLES, dtype=jnp.uint32)))
    spec = Speculation(k, acceptance="rejection")

    drafts, weights, last = [], [], jnp.zeros(SAMPLES, jnp.int32)
    for j in range(k):
        adjusted = jnp.asarray(draft)[last]
        weights.append(sampling.log_weights(adjusted, rows.sampling))
        last = sampling.sample(adjusted, rows.sampling, rows.position + j, DRAFT)
        drafts.append(last)
    rows = dataclasses.replace(rows, drafts=jnp.stack(drafts, 1), weights=jnp.stack(weights, 1))
    before = jnp.concatenate([jnp.zeros((SAMPLES, 1), jnp.int32), rows.drafts], axis=1)
    tokens, accepted, _ = check(jnp.asarray(target)[before], rows, state_of(rows, BINS, spec), spec, BINS)
    tokens, accepted = np.array(tokens), np.asarray(accepted)

    kept = np.exp(
        np.asarray(sampling.log_weights(jnp.asarray(target), jax.tree.map(lambda x: x[:BINS], rows.sampling)))
    )
    p = kept / kept.sum(-1, keepdims=True)
    rng = np.random.default_rng(3)
    for j in range(1, k + 1):
        drawn = (rng.random((SAMPLES, 1)) > np.cumsum(p[tokens[:, j - 1]], axis=1)).sum(1).clip(0, BINS - 1)
        tokens[:, j] = np.where(j < accepted, tokens[:, j], drawn)

    want = p[0]
    for _ in range(k):
        want = want[..., None] * p
    got = np.zeros(want.shape)
    np.add.at(got, tuple(tokens.T), 1)
    assert abs(chi_square(got, want * SAMPLES)) < 4
    # The test would notice: drafts taken as they are do not have this distribution.
    naive = np.zeros(BINS)
    np.add.at(naive, np.asarray(rows.drafts[:, 0]), 1)
    assert chi_square(naive, p[0] * SAMPLES) > 50
    # A first draft is kept with probability sum min(p, q), the most that any rule reaches.
    q = np.exp(np.asarray(weights[0][0]))
    overlap = np.minimum(p[0], q / q.sum()).sum()
    assert abs((accepted > 1).mean() - overlap) < 0.015


def test_rejection_of_greedy_rows_is_greedy():
    spec, logits = Speculation(2, acceptance="rejection"), logits_of(8, 2, 2)
    want = best(logits)
    drafts = want[:, :2].copy()
    drafts[1, 0] = (drafts[1, 0] + 1) % VOCAB
    weights = jnp.where(jax.nn.one_hot(drafts, VOCAB) > 0, 0, -jnp.inf)
    rows = rows_of(drafts, weights=weights)
    tokens, accepted, _ = check(logits, rows, state_of(rows, spec=spec), spec, VOCAB)
    assert accepted.tolist() == [3, 1]
    assert tokens[0].tolist() == want[0].tolist() and tokens[1, 0] == want[1, 0]


# --- the pin --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", [1, 1.5, 2.99, 3.61, 4])
def test_a_pin_forces_the_mean_with_the_least_variance(pin):
    """Over many steps the mean acceptance length is the pin, and no step is more than one token away from it."""
    k, steps_run = 3, 400
    spec, logits = Speculation(k, pin=pin), logits_of(9, 2, k)
    rows, lengths = rows_of(np.zeros((2, k))), []
    for _ in range(steps_run):
        tokens, accepted, credit = check(logits, rows, state_of(rows), spec, VOCAB)
        lengths.append(int(accepted[0]))
        assert tokens[0, : lengths[-1] - 1].tolist() == [0] * (lengths[-1] - 1)  # the drafts, right or not
        assert tokens[0, lengths[-1] - 1] == best(logits)[0, lengths[-1] - 1]
        rows = dataclasses.replace(rows, credit=credit)
    assert abs(np.mean(lengths) - pin) < 1 / 100
    assert set(lengths) <= {int(np.floor(pin)), int(np.ceil(pin))}


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "eagle"}, "use 'mtp'"),
        ({"num_drafts": 3}, "allowed: " + ", ".join(KEYS)),
        ({"num_speculative_tokens": -1}, f"0 to {MOST_DRAFTS}"),
        ({"num_speculative_tokens": MOST_DRAFTS + 1}, f"0 to {MOST_DRAFTS}"),
        ({"num_speculative_tokens": 2.5}, "whole number"),
        ({"num_speculative_tokens": True}, "whole number"),
        ({"acceptance": "typical"}, "'coupled' or 'rejection'"),
        ({"num_speculative_tokens": 3, "pin": 4.5}, "1 to 4"),
        ({"num_speculative_tokens": 3, "pin": 0.5}, "1 to 4"),
        ({"pin": "high"}, "1 to 2"),
        ({"adaptive": 1}, "true or false"),
        ([3], "give a mapping"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config, words):
    with pytest.raises(ConfigError, match="speculative_config") as error:
        Speculation.read(config)
    assert words in str(error.value)


def test_a_config_is_read():
    assert Speculation.read(None) == (None, "sharded")
    assert Speculation.read({}) == (Speculation(1), "sharded")
    whole = {"method": "mtp", "num_speculative_tokens": 5, "draft_kv": "replicated", "acceptance": "rejection"}
    assert Speculation.read(whole | {"pin": None, "adaptive": True}) == (
        Speculation(5, "rejection", None, True),
        "replicated",
    )
    assert Speculation(5, adaptive=True).levels == (0, 1, 2, 3, 4, 5) and Speculation(5).levels == (5,)
