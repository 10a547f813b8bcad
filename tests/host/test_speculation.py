"""Acceptance counted by place, the alarm, and the choice of how many drafts to make."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.host.speculation import Acceptance, AcceptanceAlarm, AdaptiveDrafts, acceptance

MOST = 5
ROW = st.integers(0, MOST).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
STEPS = st.lists(st.lists(ROW, max_size=4), max_size=12)


def test_one_step_by_hand():
    """Three rows verified 3, 3 and 1 drafts: 0, 3 and 1 of them were accepted."""
    counts = acceptance(MOST, [3, 3, 1], [0, 3, 1])
    assert counts == Acceptance((3, 2, 2, 0, 0), (2, 1, 1, 0, 0))
    assert counts.rates == (2 / 3, 1 / 2, 1 / 2, None, None)
    assert counts.drafts_per_row == 4 / 3
    assert counts.acceptance_length == 1 + 4 / 3
    assert counts.acceptance_rate == 4 / 7


def test_rows_without_drafts_are_not_in_the_length():
    """What k = 0 brings says nothing about the drafts."""
    none = acceptance(2, [0, 0], [0, 0])
    assert none.acceptance_length is none.drafts_per_row is none.acceptance_rate is None
    assert none.rates == (None, None)
    assert (none + acceptance(2, [2], [2])).acceptance_length == 3
    assert acceptance(0, [0], [0]).acceptance_length is None


@given(STEPS)
def test_counts_add_up_and_come_off_again(steps):
    nothing = acceptance(MOST, (), ())
    each = [acceptance(MOST, [k for k, _ in rows], [n for _, n in rows]) for rows in steps]
    total = sum(each, nothing)
    assert total == Acceptance(
        tuple(sum(k > place for rows in steps for k, _ in rows) for place in range(MOST)),
        tuple(sum(n > place for rows in steps for _, n in rows) for place in range(MOST)),
    )
    for step in each:
        total -= step
    assert total == nothing


def window(*rates: float, rows: int = 400) -> Acceptance:
    return Acceptance((rows,) * len(rates), tuple(round(rows * rate) for rate in rates))


GOOD = window(0.8, 0.6, 0.4)


def test_the_alarm_warns_once_and_again_after_recovery():
    alarm = AcceptanceAlarm(3)
    assert [alarm.take(GOOD) for _ in range(3)] == [None] * 3
    text = alarm.take(window(0.78, 0.29, 0.19))
    assert "draft 2 is accepted 0.29 of the time, 0.60 before; draft 3" in text and "draft 1" not in text
    for cause in ("geometry", "weights", "dtype", "prompt mix", "pin"):
        assert cause in text
    assert alarm.raised and alarm.take(window(0.78, 0.1, 0.1)) is None, "it was said already"
    assert alarm.take(window(0.78, 0.32, 0.35)) is None and alarm.raised, "at the threshold is not recovered"
    assert alarm.take(GOOD) is None and not alarm.raised
    assert "draft 2" in alarm.take(window(0.78, 0.2, 0.4))


def test_what_has_fallen_does_not_become_the_level():
    alarm = AcceptanceAlarm(3)
    alarm.take(GOOD)
    assert alarm.take(window(0.35, 0.25, 0.1)) is not None
    for _ in range(50):
        assert alarm.take(window(0.35, 0.25, 0.1)) is None
    assert alarm.raised


def test_a_first_draft_that_is_never_right_needs_no_earlier_level():
    alarm = AcceptanceAlarm(1)
    assert "draft 1 is accepted 0.25 of the time, less than 0.3" in alarm.take(window(0.25))
    assert AcceptanceAlarm(1).take(window(0.31)) is None


def test_a_slow_fall_is_seen_too():
    alarm = AcceptanceAlarm(2)
    texts = [alarm.take(window(0.8, 0.6 * 0.97**i)) for i in range(100)]
    assert sum(text is not None for text in texts) == 1


def test_few_rows_say_nothing_until_they_are_enough():
    alarm = AcceptanceAlarm(1)
    texts = [alarm.take(window(0.0, rows=10)) for _ in range(20)]
    assert texts[:19] == [None] * 19 and texts[19] is not None
    # A place that is seldom right: chance alone halves it now and then.
    alarm = AcceptanceAlarm(2)
    alarm.take(window(0.8, 0.05, rows=2000))
    assert alarm.take(window(0.8, 0.0)) is None
    assert alarm.take(window(0.8, 0.0, rows=2000)) is not None


def test_no_alarm_while_nothing_changes():
    rng = np.random.default_rng(0)
    alarm = AcceptanceAlarm(MOST)
    for _ in range(400):
        accepted = (np.cumprod(rng.random((250, MOST)) < 0.6, axis=1)).sum(axis=1)
        assert alarm.take(acceptance(MOST, [MOST] * 250, accepted.tolist())) is None


# Relative step times by number of drafts. Launch-bound: a draft costs little; compute-bound: a row costs as another.
COSTS = {
    "launch-bound": lambda k, rows: 1 + 0.04 * k,
    "middle": lambda k, rows: 1 + 0.2 * k,
    "compute-bound": lambda k, rows: 1 + 0.9 * k,
    "grows with rows": lambda k, rows: 1 + 0.03 * k + 0.02 * k * rows,
    "first is dear": lambda k, rows: 1 if k == 0 else 1.9 + 0.02 * k,
}
# Acceptance of a draft after all before it were accepted.
PROFILES = {
    "trained": (0.85, 0.75, 0.7, 0.65, 0.6),
    "flat": (0.7, 0.7, 0.7, 0.7, 0.7),
    "falls off": (0.8, 0.5, 0.2, 0.1, 0.1),
    "useless": (0.05, 0.05, 0.05, 0.05, 0.05),
    "perfect": (1.0, 1.0, 1.0, 1.0, 1.0),
    "late": (0.3, 0.9, 0.9, 0.9, 0.9),
}
BUCKETS = (1, 4, 16, 64)


def table(cost) -> dict[int, dict[int, float]]:
    return {k: {rows: cost(k, rows) for rows in BUCKETS} for k in range(MOST + 1)}


def length(profile, k: int) -> float:
    return 1 + sum(np.prod(profile[: place + 1]) for place in range(k))


def simulate(drafts: AdaptiveDrafts, profile, rows: int, steps: int, seed: int = 0) -> list[int]:
    """Lets it choose and shows it what comes of that; its choices. A step verifies drafts that the step before made."""
    rng = np.random.default_rng(seed)
    chosen = [drafts.choose(rows)]
    for _ in range(steps):
        chosen.append(drafts.choose(rows))
        verified = min(chosen[-2:])
        accepted = np.cumprod(rng.random((rows, MOST)) < profile, axis=1)[:, :verified].sum(axis=1)
        drafts.observe([verified] * rows, accepted.tolist())
    return chosen


def rate(chosen: list[int], profile, cost, rows: int) -> float:
    """Expected tokens per time: chance in the tokens themselves is no matter of the choice."""
    pairs = tuple(itertools.pairwise(chosen))
    return sum(length(profile, min(pair)) for pair in pairs) / sum(cost(k, rows) for _, k in pairs)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_it_settles_on_the_best_number_of_drafts(profile, cost):
    for rows, steps in ((1, 4500), (64, 1500)):
        drafts = AdaptiveDrafts(MOST, table(cost))
        chosen = simulate(drafts, profile, rows, steps)[steps // 3 :]
        best = max(length(profile, k) / cost(k, rows) for k in range(MOST + 1))
        assert rate(chosen, profile, cost, rows) >= 0.98 * best, (rows, np.bincount(chosen))


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("before, after", [("trained", "useless"), ("useless", "trained"), ("falls off", "late")])
def test_it_follows_a_change(before, after, cost):
    """Within five half-lives."""
    drafts = AdaptiveDrafts(MOST, table(cost))
    simulate(drafts, PROFILES[before], 4, 2000)
    chosen = simulate(drafts, PROFILES[after], 4, 4000, seed=1)[2500:]
    best = max(length(PROFILES[after], k) / cost(k, 4) for k in range(MOST + 1))
    assert rate(chosen, PROFILES[after], cost, 4) >= 0.98 * best, np.bincount(chosen)


def test_more_rows_may_mean_fewer_drafts():
    drafts = AdaptiveDrafts(MOST, table(COSTS["grows with rows"]))
    simulate(drafts, PROFILES["trained"], 1, 2000)
    few, many, most = (collections.Counter(simulate(drafts, PROFILES["trained"], n, 100)) for n in (1, 16, 64))
    usual = [choices.most_common(1)[0][0] for choices in (few, many, most)]
    assert usual[0] > usual[1] > usual[2]


def test_a_step_costs_what_the_bucket_that_holds_it_costs():
    drafts = AdaptiveDrafts(1, {0: {4: 1.0, 16: 1.0}, 1: {4: 1.1, 16: 3.0}})
    assert [drafts.choose(rows) for rows in (0, 1, 4, 5, 16, 1000)] == [1, 1, 1, 0, 0, 0]


def test_it_starts_with_hope_and_is_the_same_every_time():
    assert AdaptiveDrafts(MOST, table(COSTS["middle"])).choose(1) == MOST
    runs = [
        simulate(AdaptiveDrafts(MOST, table(COSTS["middle"])), PROFILES["falls off"], 2, 500, seed=3) for _ in range(2)
    ]
    assert runs[0] == runs[1] and len(set(runs[0])) > 1


def test_only_what_is_compiled_is_chosen():
    cost = {k: row for k, row in table(COSTS["middle"]).items() if k in (0, 2, 5)}
    drafts = AdaptiveDrafts(MOST, cost)
    assert set(simulate(drafts, PROFILES["falls off"], 4, 1000)) <= {0, 2, 5}


def test_what_it_believes_is_what_it_saw():
    drafts = AdaptiveDrafts(MOST, table(COSTS["launch-bound"]), half_life=10**6)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        drafts.observe([MOST] * 8, np.cumprod(rng.random((8, MOST)) < 0.7, axis=1).sum(axis=1).tolist())
    want = [length((0.7,) * MOST, k) for k in range(MOST + 1)]
    np.testing.assert_allclose(drafts.expected_lengths(), want, rtol=0.02)


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({}, r"give some of 0 … 5"),
        ({6: {1: 1.0}}, r"got numbers of drafts \[6\], give some of 0 … 5"),
        ({0: {1: 1.0}, 1: {2: 1.0}}, r"1 drafts have row buckets \[2\], others \[1\]"),
        ({0: {}}, "row buckets"),
        ({0: {1: 0.0}}, "all must be above 0"),
        ({0: {1: float("nan")}}, "all must be above 0"),
    ],
)
def test_costs_that_cannot_be(cost, words):
    with pytest.raises(ConfigError, match=words):
        AdaptiveDrafts(MOST, cost)


def test_a_place_that_nothing_was_made_for_is_not_rejected():
    """When more drafts are chosen, the first step has only those that the step before made."""
    drafts = AdaptiveDrafts(2, {1: {1: 1.0}, 2: {1: 1.2}})
    for _ in range(100):
        drafts.observe([1], [1])
    assert drafts.expected_lengths() == pytest.approx([1, 2, 3])
    drafts.observe([2], [1])
    assert drafts.expected_lengths() == pytest.approx([1, 2, 2], abs=0.02)


def test_trials_may_lose_a_hundredth():
    """However long it is so: a second draft never pays, and is tried again and again."""
    drafts = AdaptiveDrafts(1, {0: {1: 1.0}, 1: {1: 1.9}})
    chosen = simulate(drafts, (0.0,) * MOST, 1, 20_000)
    tried = sum(chosen)
    assert 5 * 10 <= tried <= (0.01 * 20_000 + 10 * 1.9) / 0.9
