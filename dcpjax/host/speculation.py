"""What the drafts are worth: acceptance by place, an alarm when it falls, and how many drafts to make.

Two figures must not be mixed up. *Accepted drafts per row* is 0 … k; the *acceptance length* counts the token that every
row brings beside them, 1 … k + 1. Everything here is a function of counts: no clock, no chance.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

from dcpjax.errors import ConfigError

# A window of the alarm: enough rows for a rate of 0.3 to be known within 0.03.
_ALARM_ROWS = 200
# Half of a level is told from chance where at least so many acceptances were to be expected.
_EXPECTED = 30
_FIRST_PLACE_LEAST = 0.3
# A rate that has fallen counts as recovered this far above the threshold, or the alarm would come and go.
_RECOVERED = 1.2

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


def acceptance(most: int, num_drafts: int, accepted: Sequence[int]) -> Acceptance:
    """One step's counts, `[most]`: its decode rows verified `num_drafts` each and accepted 0 … `num_drafts`."""
    verified = tuple(len(accepted) if place < num_drafts else 0 for place in range(most))
    return Acceptance(verified, tuple(sum(n > place for n in accepted) for place in range(most)))


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
    observation counts half.

    A place is believed to be as good as what was seen of it allows: one acceptance and one standard error are added. So
    it starts high, rises again while nothing is seen, and a place that could pay is tried anew, the less often the more
    such a trial costs.
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

    def choose(self, num_rows: int) -> int:
        """The number of drafts for a step of `num_rows` decode rows."""
        place = bisect.bisect_left(self._buckets, num_rows)
        bucket = self._buckets[min(place, len(self._buckets) - 1)]
        lengths = self.expected_lengths()
        return max(self._choices, key=lambda k: (lengths[k] / self._cost[k][bucket], -k))

    def observe(self, num_drafts: int, accepted: Sequence[int]) -> None:
        """One step: its decode rows verified `num_drafts` each (0 counts too) and accepted so many of them."""
        keep = 0.5 ** (1 / self._half_life)
        for place in range(self._most):
            self._verified[place] *= keep
            self._accepted[place] *= keep
            if place < num_drafts:
                self._verified[place] += sum(n >= place for n in accepted)
                self._accepted[place] += sum(n > place for n in accepted)

    def expected_lengths(self) -> list[float]:
        """Acceptance length by number of drafts, 0 … most, as it is believed to be."""
        lengths, reach = [1.0], 1.0
        for accepted, verified in zip(self._accepted, self._verified, strict=True):
            rate = (accepted + 1) / (verified + 1)
            reach *= min(1.0, rate + math.sqrt(rate * (1 - rate) / (verified + 1)))
            lengths.append(lengths[-1] + reach)
        return lengths
