"""What dealing out the draft's cache saves: decode steps of a toy network with the draft sharded and replicated.

The model of a step, in time over all ranks that share this machine's cores: L tokens of context, n layers that scan it,
k drafts, d ranks; x is one query's scan of one token::

    replicated  W + k·m         + x·L·(n·(k + 1)/d + 2·k)
    sharded     W + k·m/d + k·τ + x·L·(n·(k + 1)/d + 2·k/d)

A target layer scans once for each of the k + 1 verified tokens, since on a CPU every query reads the keys for itself. So
does the draft's first pass, which writes the rows of all verified tokens; its other k − 1 iterations have one query each:
2·k scans in all. x and the two constants are fitted to times at some L; what they say about other L is the prediction.
The attention reads few rows, so m is near 0 and the constants' difference is k·τ.

Acceptance is pinned, so that both arms make the same steps; their tokens must be equal.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcpjax.bench import arms
from dcpjax.bench.arms import Arm, Run
from dcpjax.build import EngineConfig
from dcpjax.spec import Speculation
from models import toy
from models.config import ModelConfig

LAYOUTS = ("sharded", "replicated")
PAGE_TOKENS = 64
WANTED_RATIO = 1.33
ROUND_TO = 512  # lengths that are chosen, so that their programs can be found again


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run. fitted, tested: context lengths, tokens. tokens: generated a run, of each user. pin: tokens a step.

    The length whose predicted ratio is the wanted one at `at_dcp` is tested too, at every dcp.
    """

    layers: int = 6
    drafts: int = 5
    pin: float = 3.7
    fitted: tuple[int, ...] = (4096, 16384)
    tested: tuple[int, ...] = (8192,)
    at_dcp: int = 4
    repeats: int = 7
    tokens: int = 64
    users: int = 4
    alone: bool = True  # whether dcp 1 must give the same tokens

    @property
    def model(self) -> ModelConfig:
        """The toy network that is timed."""
        return toy.long_context(self.layers)


QUICK = Sizes(layers=1, drafts=2, pin=2.5, fitted=(256,), tested=(), repeats=2, tokens=12, users=1, alone=False)


@dataclasses.dataclass(frozen=True)
class Fit:
    """Seconds: `scan` x of one query and token, `constant` of both layouts; `scans` of a step by layout."""

    scan: float
    constant: dict[str, float]
    scans: dict[str, float]

    def seconds(self, draft_kv: str, length: int) -> float:
        """Of a step with this layout at `length` tokens of context."""
        return self.constant[draft_kv] + self.scan * self.scans[draft_kv] * length

    def ratio(self, length: int) -> float:
        """Replicated over sharded step time."""
        return self.seconds("replicated", length) / self.seconds("sharded", length)

    def length(self, ratio: float) -> float:
        """Where the ratio is `ratio`; infinite if it never is."""
        rest = self.scan * (self.scans["replicated"] - ratio * self.scans["sharded"])
        due = ratio * self.constant["sharded"] - self.constant["replicated"]
        return due / rest if rest > 0 else float("inf")


def scans(sizes: Sizes, dcp: int, draft_kv: str) -> float:
    """Scans of the whole context by one query that a step costs every rank."""
    target = sizes.layers * (sizes.drafts + 1) / dcp
    return target + 2 * sizes.drafts / (dcp if draft_kv == "sharded" else 1)


def fit(points: Sequence[dict[str, Any]], sizes: Sizes, dcp: int) -> Fit:
    """x and the constants by least squares of the relative errors of `points`' step times.

    The replicated time is the sharded one by the ratio of pairs: what else the machine did then cancels.
    """
    matrix, per_step = [], {name: scans(sizes, dcp, name) for name in LAYOUTS}
    for point in points:
        sharded = point["step_seconds"]["sharded"]["median"]
        for i, seconds in enumerate((sharded, sharded * point["measured_ratio"])):
            matrix.append([x / seconds for x in (per_step[LAYOUTS[i]] * point["length"], i == 0, i == 1)])
    x, *constants = np.linalg.lstsq(np.array(matrix), np.ones(len(matrix)))[0].tolist()
    return Fit(x, dict(zip(LAYOUTS, constants, strict=True)), per_step)


def measure(dcps: Sequence[int], sizes: Sizes, say=print) -> dict[str, Any]:
    """Figures of all dcp sizes: `rows` by dcp at the chosen length, every measured point, fits, and four users."""
    points: dict[int, list[dict[str, Any]]] = {dcp: [] for dcp in dcps}
    fits: dict[int, Fit] = {}

    def time(dcp: int, length: int, users: int = 1) -> dict[str, Any]:
        point = _point(sizes, dcp, length, users)
        arms.forget_programs()
        say(_line(point))
        return point

    for dcp in dcps:
        points[dcp] += [time(dcp, length) for length in sizes.fitted]
        fits[dcp] = fit(points[dcp], sizes, dcp)
    chosen = _choose(fits[sizes.at_dcp], sizes)
    for dcp in dcps:
        wanted = {chosen, *(sizes.tested if dcp == sizes.at_dcp else ())} - set(sizes.fitted)
        points[dcp] += [time(dcp, length) for length in sorted(wanted)]
        for point in points[dcp]:
            point["predicted_ratio"] = fits[dcp].ratio(point["length"])
            point["fitted"] = point["length"] in sizes.fitted
    rows = {dcp: next(p for p in points[dcp] if p["length"] == chosen) for dcp in dcps}
    texts = {point.pop("text") for dcp in dcps for point in points[dcp] if point["length"] == chosen}
    if sizes.alone:
        texts.add(arms.decode(_arm(sizes, 1, "sharded", chosen, 1), sizes.tokens).text)
    figures = {
        "sizes": dataclasses.asdict(sizes),
        "length": chosen,
        "rows": rows,
        "points": [{k: v for k, v in point.items() if k != "text"} for dcp in dcps for point in points[dcp]],
        "fits": {dcp: _explain(fits[dcp], sizes) for dcp in dcps},
        "equal_tokens": len(texts) == 1,
    }
    if sizes.users > 1:
        point = time(sizes.at_dcp, chosen, sizes.users)
        del point["text"]
        figures["users"] = point | {"predicted_ratios": _with_users(fits[sizes.at_dcp], chosen, sizes.users)}
    return figures


def _choose(fitted: Fit, sizes: Sizes) -> int:
    """The length with the wanted ratio, or the nearest within the fitted ones."""
    low, high = min(sizes.fitted), max(sizes.fitted)
    length = min(max(fitted.length(WANTED_RATIO), low), high)
    return min(max(round(length / ROUND_TO) * ROUND_TO, low), high)


def _with_users(fitted: Fit, length: int, users: int) -> list[float]:
    """Ratios between which several users must lie: all that does not scan costs as for one user, or as many times."""
    return [fitted.ratio(length), fitted.ratio(users * length)]


def _explain(fitted: Fit, sizes: Sizes) -> dict[str, Any]:
    replicated, sharded = fitted.constant["replicated"], fitted.constant["sharded"]
    return {
        "x_seconds": fitted.scan,
        "constant_seconds": fitted.constant,
        "tau_seconds": (sharded - replicated) / sizes.drafts,
        "scans": fitted.scans,
        "largest_ratio": fitted.scans["replicated"] / fitted.scans["sharded"],
    }


def _arm(sizes: Sizes, dcp: int, draft_kv: str, length: int, users: int) -> Arm:
    """An engine whose block tables span `length` tokens, all but one page of them (or what it generates) cached."""
    spare = -(-(sizes.tokens + 2 * sizes.drafts) // PAGE_TOKENS)
    pages = length // PAGE_TOKENS
    config = EngineConfig(
        decode_context_parallel_size=dcp,
        draft_kv=draft_kv,
        speculation=Speculation(sizes.drafts, pin=sizes.pin),
        block_size=PAGE_TOKENS,
        num_blocks=users * pages + 1,
        max_model_len=length,
        max_num_seqs=users,
        max_num_batched_tokens=(sizes.drafts + 1) * users,
    )
    return arms.planted(sizes.model, config, users, pages - spare)


def _point(sizes: Sizes, dcp: int, length: int, users: int) -> dict[str, Any]:
    """Both layouts at one length, in turn; the first run of each, which compiles, is thrown away."""
    both = {name: _arm(sizes, dcp, name, length, users) for name in LAYOUTS}
    for arm in both.values():
        arms.decode(arm, sizes.tokens)
    runs: dict[str, list[Run]] = {name: [] for name in LAYOUTS}
    for _ in range(sizes.repeats):
        for name, arm in both.items():
            runs[name].append(arms.decode(arm, sizes.tokens))
    steps = {name: [run.seconds / run.steps for run in made] for name, made in runs.items()}
    speeds = {name: [run.tokens / run.seconds for run in made] for name, made in runs.items()}
    texts = {run.text for made in runs.values() for run in made}
    median = {name: statistics.median(speeds[name]) for name in LAYOUTS}
    # Runs that follow each other saw the same machine.
    paired = arms.summary([a / b for a, b in zip(speeds["sharded"], speeds["replicated"], strict=True)])
    return {
        "dcp": dcp,
        "length": length,
        "users": users,
        "step_seconds": {name: arms.summary(steps[name]) for name in LAYOUTS},
        "tokens_per_second": {name: arms.summary(speeds[name]) for name in LAYOUTS},
        "measured_ratio": paired["median"],
        "measured_quartiles": paired["quartiles"],
        "ratio_of_medians": median["sharded"] / median["replicated"],
        "tokens_per_step": runs["sharded"][0].tokens / runs["sharded"][0].steps / users,
        "equal_tokens": len(texts) == 1,
        "load": arms.machine()["load"],
        "text": runs["sharded"][0].text,
    }


def _line(point: dict[str, Any]) -> str:
    step = {name: point["step_seconds"][name]["median"] * 1e3 for name in LAYOUTS}
    return (
        f"dcp {point['dcp']}, {point['length']} tokens, {point['users']} user(s): step {step['sharded']:.1f} ms sharded, "
        f"{step['replicated']:.1f} ms replicated, ratio {point['measured_ratio']:.3f} (of "
        f"medians {point['ratio_of_medians']:.3f}), {'equal' if point['equal_tokens'] else 'OTHER'} tokens, "
        f"load {point['load']}"
    )
