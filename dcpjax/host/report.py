"""What operators are told of a running engine: its counters, the line it writes now and then, the state of its devices."""

import dataclasses
from collections.abc import Mapping

from dcpjax.host.hits import PrefixStats
from dcpjax.host.request import FinishReason
from dcpjax.host.speculation import Acceptance


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and the state now.

    running, waiting: requests now. page_usage: used pages over all, 0…1. steps: dispatched. step_prompt_tokens,
    step_decode_tokens: query tokens of the newest step, drafts included. preemptions, prompt_tokens (once per request,
    when its first chunk is scheduled), generated_tokens: sums. finished: requests by reason. acceptance: drafts of all
    decode rows. prefix: what the prefix cache saved. seconds: sums of host time by part of a step: "plan", "dispatch",
    "wait" for the device, "absorb".
    """

    running: int
    waiting: int
    page_usage: float
    steps: int
    step_prompt_tokens: int
    step_decode_tokens: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    finished: dict[FinishReason, int]
    acceptance: Acceptance
    prefix: PrefixStats
    seconds: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Moment:
    """Counters at one time. seconds: of a clock that runs while the engine is busy. prompt_tokens, generated_tokens:
    sums, cached prompt tokens included. running, waiting: requests. page_usage, hit_rate: 0 … 1; hit_rate is that of
    the last 1,000 requests, None without a prefix cache or before it was asked. acceptance: sums, None without drafts.
    """

    seconds: float
    prompt_tokens: int
    generated_tokens: int
    running: int
    waiting: int
    page_usage: float
    hit_rate: float | None = None
    acceptance: Acceptance | None = None


@dataclasses.dataclass(frozen=True)
class DeviceState:
    """compiled_shapes: step programs. compile_seconds: spent on them ahead of time. memory: bytes in use by device; those
    of weights and caches where the platform does not tell."""

    compiled_shapes: int = 0
    compile_seconds: float = 0.0
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)


def report(before: Moment, now: Moment, pin: float | None = None) -> str:
    """Rates between two moments and the state at the later one. pin: the acceptance length that is forced."""
    seconds = now.seconds - before.seconds

    def rate(sum_now: int, sum_before: int) -> str:
        return f"{(sum_now - sum_before) / seconds if seconds > 0 else 0.0:,.1f} tokens/s"

    parts = [
        f"prompt {rate(now.prompt_tokens, before.prompt_tokens)}",
        f"generation {rate(now.generated_tokens, before.generated_tokens)}",
        f"running {now.running}",
        f"waiting {now.waiting}",
        f"cache used {100 * now.page_usage:.1f} %",
    ]
    if now.hit_rate is not None:
        parts.append(f"prefix hit rate {100 * now.hit_rate:.1f} %")
    if now.acceptance is not None:
        parts.append(_drafts(now.acceptance - before.acceptance if before.acceptance else now.acceptance, pin))
    return ", ".join(parts)


def _drafts(acceptance: Acceptance, pin: float | None) -> str:
    """The bonus token is in the length, as the bounds say."""
    length, most = acceptance.acceptance_length, len(acceptance.verified) + 1
    shown = "none yet" if length is None else f"{length:.2f}"
    # Of all rows, those that had fewer drafts included: so the places fall, and add up to the length.
    rows = acceptance.num_rows
    counts = zip(acceptance.accepted, acceptance.verified, strict=True)
    places = " ".join(f"{accepted / rows:.2f}" if verified else "-" for accepted, verified in counts)
    forced = "" if pin is None else f", PINNED to {pin:g}: the text is not the model's"
    return f"acceptance length {shown} (of 1 to {most}{forced}), accepted by place {places}"
