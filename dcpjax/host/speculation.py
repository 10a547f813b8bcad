"""What the drafts are worth: acceptance by place, an alarm when it falls, and how many drafts to make.

Two figures must not be mixed up. *Accepted drafts per row* is 0 … k; the *acceptance length* counts the token that every
row brings beside them, 1 … k + 1. Everything here is a function of counts: no clock, no chance.
"""

import bisect
import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from dcpjax.errors import ConfigError

# A window of the alarm: enough rows for a rate of 0.3 to be known within 0.03.
_ALARM_ROWS = 200
# Half of a level is told from chance where at least so many acceptances were to be expected.
_EXPECTED = 30
_FIRST_PLACE_LEAST = 0.3
# A rate that has fallen counts as recovered this far above the threshold, or the alarm would come and go.
_RECOVERED = 1.2

# The first step of a trial only makes the drafts, the others verify them.
_TRIAL_STEPS = 10
_TRIAL_SHARE = 0.01
# At the start all is unknown: so many of the dearest steps may be lost at once.
_FIRST_LOSS = 10

_CAUSES = (
    "a draft cache read with another geometry or number of shards than it was written with; wrong weights or a wrong "
    "dtype of the MTP layer; a prompt mix that the draft was not trained on; an acceptance pin that is on"
)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts by place of the draft, place 0 first: rows that `verified` a draft there, and `accepted` it. Both `[k]`.

    A draft is accepted only if all drafts before it are.
    """

    verified: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Decode rows that verified a draft at all."""
        return self.verified[0] if self.verified else 0

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Accepted over verified by place; None where nothing was verified."""
        pairs = zip(self.accepted, self.verified, strict=True)
        return tuple(accepted / verified if verified else None for accepted, verified in pairs)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over all verified drafts, 0 … 1."""
        return sum(self.accepted) / sum(self.verified) if self.num_rows else None

    @property
    def drafts_per_row(self) -> float | None:
        """Accepted drafts of a row, 0 … k: without the token that a row brings anyway."""
        return sum(self.accepted) / self.num_rows if self.num_rows else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a row brings, 1 … k + 1: its accepted drafts and the bonus token."""
        return 1 + self.drafts_per_row if self.num_rows else None

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return self._with(other, 1)

    def __sub__(self, earlier: "Acceptance") -> "Acceptance":
        """What was counted since `earlier`, of the same counters."""
        return self._with(earlier, -1)

    def _with(self, other: "Acceptance", sign: int) -> "Acceptance":
        def combine(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + sign * y for x, y in zip(a, b, strict=True))

        return Acceptance(combine(self.verified, other.verified), combine(self.accepted, other.accepted))


def acceptance(most: int, verified: Sequence[int], accepted: Sequence[int]) -> Acceptance:
    """One step's counts, `[most]`: how many drafts each of its decode rows verified, and accepted of them."""

    def by_place(rows: Sequence[int]) -> tuple[int, ...]:
        return tuple(sum(n > place for n in rows) for place in range(most))

    return Acceptance(by_place(verified), by_place(accepted))


def fallen(window: Acceptance, earlier: Acceptance, margin: float = 1.0) -> list[str]:
    """What is wrong with the rates of `window`, a line for each place: below half of the level of `earlier` counts, or
    too low at the first place. Places with too few counts to tell are left out. margin: a factor on the thresholds.
    """
    lines = []
    levels = zip(window.rates, earlier.rates, window.verified, strict=True)
    for place, (rate, level, verified) in enumerate(levels):
        if rate is None:
            continue
        if level is not None and level * verified >= _EXPECTED and rate < margin * level / 2:
            lines.append(f"draft {place + 1} is accepted {rate:.2f} of the time, {level:.2f} before")
        elif place == 0 and verified >= _ALARM_ROWS and rate < margin * _FIRST_PLACE_LEAST:
            lines.append(f"draft 1 is accepted {rate:.2f} of the time, less than {_FIRST_PLACE_LEAST}")
    return lines


class AcceptanceAlarm:
    """One warning when acceptance falls, and none again until it has recovered.

    Counts are gathered into windows of enough rows to tell. A place's level is that of all windows before, those left
    out in which something had fallen.
    """

    def __init__(self, most: int):
        self._pending = self._earlier = Acceptance((0,) * most, (0,) * most)
        self.raised = False

    def take(self, new: Acceptance) -> str | None:
        """Takes counts made since the last call; the text of a warning if there is to be one now."""
        window = self._pending + new
        if window.num_rows < _ALARM_ROWS:
            self._pending = window
            return None
        self._pending = window - window
        lines = fallen(window, self._earlier, _RECOVERED if self.raised else 1.0)
        first, self.raised = not self.raised, bool(lines)
        if not lines:
            self._earlier += window
        if not (lines and first):
            return None
        return f"draft acceptance is low: {'; '.join(lines)}. Likely causes: {_CAUSES}"


class AdaptiveDrafts:
    """How many drafts bring the most tokens per time, from measured acceptance and the cost of a step.

    most: the most drafts. cost: `cost[k][rows]` is the relative time of a step of up to `rows` decode rows that verify
    k drafts each; the ks are the choices, all with the same buckets of rows. half_life: steps after which an
    observation counts half. Raises `ConfigError` for costs that are no such table.

    Measuring needs trials: a place that is never verified is never seen. A larger number is tried for a few steps when
    it would pay if its places were as good as the little that was seen of them lately allows. By what was seen, trials
    may lose a hundredth of the time and no more.
    """

    def __init__(self, most: int, cost: Mapping[int, Mapping[int, float]], half_life: int = 500):
        self._choices = sorted(cost)
        if not self._choices or not 0 <= self._choices[0] <= self._choices[-1] <= most:
            raise ConfigError(f"cost: got numbers of drafts {self._choices}, give some of 0 … {most}")
        self._buckets = sorted(cost[self._choices[0]])
        for k in self._choices:
            if not self._buckets or sorted(cost[k]) != self._buckets:
                raise ConfigError(f"cost: {k} drafts have row buckets {sorted(cost[k])}, others {self._buckets}")
            if not all(math.isfinite(value) and value > 0 for value in cost[k].values()):
                raise ConfigError(f"cost: {k} drafts cost {dict(cost[k])}; all must be above 0")
        self._cost = {k: dict(cost[k]) for k in self._choices}
        self._most = most
        self._half_life = half_life
        # Of each place, among rows that had accepted all drafts before it.
        self._verified = [0.0] * most
        self._accepted = [0.0] * most
        self._trial, self._trial_steps, self._trial_bucket = 0, 0, 0  # number of drafts, and steps of it to come
        self._most_credit = self._credit = _FIRST_LOSS * max(max(row.values()) for row in self._cost.values())

    def choose(self, num_rows: int) -> int:
        """The number of drafts for a step of `num_rows` decode rows. To be called once a step."""
        place = bisect.bisect_left(self._buckets, num_rows)
        bucket = self._buckets[min(place, len(self._buckets) - 1)]
        lengths = self.expected_lengths()
        best = self._best(bucket, lengths)
        self._credit = min(self._credit + _TRIAL_SHARE * self._cost[best][bucket], self._most_credit)
        if not self._trial_steps or bucket != self._trial_bucket:
            # The least that could pay: a leap costs more, and tells more only where the first places do well.
            hoped, rate = self._hoped_lengths(), lengths[best] / self._cost[best][bucket]
            trial = next((k for k in self._choices if k > best and hoped[k] / self._cost[k][bucket] > rate), best)
            loss = self._trial_loss(trial, best, bucket, lengths)
            if trial == best or loss > self._credit or not num_rows:
                self._trial_steps = 0
                return best
            self._credit -= loss
            self._trial, self._trial_steps, self._trial_bucket = trial, _TRIAL_STEPS, bucket
        self._trial_steps -= 1
        return self._trial

    def _best(self, bucket: int, lengths: Sequence[float]) -> int:
        return max(self._choices, key=lambda k: (lengths[k] / self._cost[k][bucket], -k))

    def _trial_loss(self, k: int, best: int, bucket: int, lengths: Sequence[float]) -> float:
        """Time that a trial of `k` drafts takes beyond what its tokens take with `best`, if all is as it was seen."""
        time_of_token = self._cost[best][bucket] / lengths[best]
        tokens = 1 + (_TRIAL_STEPS - 1) * lengths[k]
        return max(0.0, _TRIAL_STEPS * self._cost[k][bucket] - tokens * time_of_token)

    def observe(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """One step: how many drafts each of its decode rows verified, 0 included, and accepted of them.

        A row verifies no more than its step before made: with more chosen now, the places beyond say nothing yet.
        """
        rows = tuple(zip(verified, accepted, strict=True))
        keep = 0.5 ** (1 / self._half_life)
        for place in range(self._most):
            self._verified[place] *= keep
            self._accepted[place] *= keep
            self._verified[place] += sum(place < most and place <= n for most, n in rows)
            self._accepted[place] += sum(n > place for _, n in rows)

    def expected_lengths(self) -> list[float]:
        """Acceptance length by number of drafts, 0 … most, from what was seen; a place never seen counts as sure."""
        return _lengths((n + 0.01) / (seen + 0.01) for n, seen in zip(self._accepted, self._verified, strict=True))

    def _hoped_lengths(self) -> list[float]:
        """The same with one acceptance and one standard error added."""
        rates = [(n + 1) / (seen + 1) for n, seen in zip(self._accepted, self._verified, strict=True)]
        errors = [math.sqrt(rate * (1 - rate) / (seen + 1)) for rate, seen in zip(rates, self._verified, strict=True)]
        return _lengths(min(1.0, rate + error) for rate, error in zip(rates, errors, strict=True))


def _lengths(rates: Iterable[float]) -> list[float]:
    """Acceptance lengths from each place's rate among rows that get there."""
    return list(itertools.accumulate(itertools.accumulate(rates, operator.mul), initial=1.0))
