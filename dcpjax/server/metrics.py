"""Prometheus metrics under vLLM's names, so that dashboards and benchmark clients work unchanged.

Counters and gauges are read from the engine when somebody asks; histograms are fed by the engine's loop.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dcpjax.host.hits import HitCounts
from dcpjax.host.report import EngineStats
from dcpjax.host.request import Request

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
)  # fmt: skip
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_CHOICES = (1, 2, 5, 10, 20)
_STEP_TOKENS = (1, 8, *(2**i for i in range(4, 15)))
_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_MASK = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.1)
_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """One engine's metrics in a registry of their own. stats: asked at every scrape. cache: what it is made of."""

    def __init__(
        self, model_name: str, max_model_len: int, stats: Callable[[], EngineStats], cache: dict[str, str] | None = None
    ):
        self._registry = prometheus_client.CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._choices: dict[int, tuple[int, int]] = {}  # by the wish they share: choices that run, the longest so far
        self._sums = _Sums(self._labels, stats)
        self._registry.register(self._sums)
        info = prometheus_client.Gauge(
            "vllm:cache_config_info",
            "What the cache is made of.",
            (*self._labels, *(cache or {})),
            registry=self._registry,
        )
        info.labels(**self._labels, **(cache or {})).set(1)
        lengths = _one_two_five(max_model_len)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "Time between token arrivals.", _BETWEEN)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first, by request.", _BETWEEN
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _WHOLE)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step.", _WHOLE)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", _WHOLE)
        self._decode = self._histogram("request_decode_time_seconds", "First token to last token.", _WHOLE)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens, by request.", lengths)
        self._generated = self._histogram("request_generation_tokens", "Generated tokens, by request.", lengths)
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not taken over from the cache, by request.", lengths
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "Tokens asked for at most.", lengths)
        self._most_generated = self._histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest choice, by request.", lengths
        )
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token.", _WHOLE)
        self._n = self._histogram("request_params_n", "Choices asked for.", _CHOICES)
        self._step_tokens = self._histogram("iteration_tokens_total", "Query tokens of a step.", _STEP_TOKENS)
        words = "Time of a step, by whether it has prompt chunks."
        phases = [{**self._labels, "phase": phase} for phase in ("prefill", "decode")]
        self._prefill_steps, self._decode_steps = self._histograms("dcpjax:step_seconds", words, _STEP, phases)
        words = "Time to find what a grammar allows, by request and step."
        (self._masks,) = self._histograms("dcpjax:grammar_mask_seconds", words, _MASK, [self._labels])

    @property
    def labels(self) -> dict[str, str]:
        """Of every sample."""
        return dict(self._labels)

    def register(self, collector: Collector) -> None:
        """Adds metrics that somebody else collects."""
        self._registry.register(collector)

    def masked(self, seconds: float) -> None:
        """A grammar said which tokens may come in one row of a step, drafts included."""
        self._masks.observe(seconds)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, UTF-8."""
        return prometheus_client.generate_latest(self._registry)

    def tokens(self, request: Request, count: int, since_last: float | None) -> None:
        """`count` tokens arrived; `since_last`: seconds since the tokens before, None for the first."""
        if since_last is not None:
            self._between.observe(since_last)
            return
        times = request.metrics
        self._first_token.observe(times.first_token - times.arrival)
        self._queue.observe(times.first_scheduled - times.arrival)
        self._prefill.observe(times.first_token - times.first_scheduled)
        self._prompt.observe(len(request.prompt))
        self._computed.observe(len(request.prompt) - (request.cached_tokens or 0))
        if request.params.max_tokens is not None:
            self._max_tokens.observe(request.params.max_tokens)
        if request.choice == 0:
            self._n.observe(request.params.n)

    def finished(self, request: Request) -> None:
        """The request has ended, for whatever reason."""
        times, count = request.metrics, len(request.output)
        self._sums.finished[request.finish_reason] += 1
        self._measure_longest(request)
        if request.finish_reason == "abort":
            return
        self._whole.observe(times.finished - times.arrival)
        self._inference.observe(times.finished - times.first_scheduled)
        self._decode.observe(times.finished - times.first_token)
        self._generated.observe(count)
        if count > 1:
            self._per_token.observe((times.finished - times.first_token) / (count - 1))

    def _measure_longest(self, request: Request) -> None:
        """The choices of one prompt share their wish, which lives as long as one of them is to come here."""
        left, longest = self._choices.pop(id(request.params), (request.params.n, 0))
        if request.finish_reason != "abort":
            longest = max(longest, len(request.output))
        if left > 1:
            self._choices[id(request.params)] = left - 1, longest
        elif longest:
            self._most_generated.observe(longest)

    def step(self, prompt_tokens: int, decode_tokens: int, seconds: float) -> None:
        """A step of so many query tokens was made, in `seconds`."""
        self._step_tokens.observe(prompt_tokens + decode_tokens)
        (self._prefill_steps if prompt_tokens else self._decode_steps).observe(seconds)

    def _histogram(self, name: str, words: str, bounds: tuple[float, ...]) -> "_Tally":
        (tally,) = self._histograms(f"vllm:{name}", words, bounds, [self._labels])
        return tally

    def _histograms(
        self, name: str, words: str, bounds: tuple[float, ...], labels: Sequence[dict[str, str]]
    ) -> list["_Tally"]:
        """One for each set of labels, all under one name."""
        tallies = [_Tally(bounds, each) for each in labels]
        self._registry.register(_Tallies(name, words, tallies))
        return tallies


class _Tally:
    """A histogram: to feed the library's own takes five times as long. Each is fed by one thread."""

    def __init__(self, bounds: tuple[float, ...], labels: dict[str, str]):
        self.labels = labels
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Counts `value` in the first bucket whose bound is not below it."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds, as Prometheus writes them, with how many values are not above each."""
        return list(zip([*map(floatToGoString, self._bounds), "+Inf"], itertools.accumulate(self._counts), strict=True))


class _Tallies(Collector):
    """Histograms of one name, whose labels have the same names."""

    def __init__(self, name: str, words: str, tallies: Sequence[_Tally]):
        self._name, self._words, self._tallies = name, words, tallies

    def collect(self) -> Iterator[Metric]:
        """The family, for Prometheus."""
        family = HistogramMetricFamily(self._name, self._words, labels=list(self._tallies[0].labels))
        for tally in self._tallies:
            family.add_metric(list(tally.labels.values()), tally.buckets(), tally.sum)
        yield family


class _Sums(Collector):
    """Counters and gauges."""

    def __init__(self, labels: dict[str, str], stats: Callable[[], EngineStats]):
        self.finished = dict.fromkeys(_REASONS, 0)
        self._labels = labels
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests in the queue, by reason.", labels=[*self._labels, "reason"]
        )
        for reason, count in (("capacity", stats.waiting), ("deferred", 0)):
            reasons.add_metric([*self._labels.values(), reason], count)
        yield reasons
        yield self._gauge("kv_cache_usage_perc", "Used pages over all, 0 to 1.", stats.page_usage)
        prefix = stats.prefix.counts
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", prefix.queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens taken over from it.", prefix.hits)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that were scheduled.", stats.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Those of them that came from the prefix cache.", prefix.hits)
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens, by where their rows came from.",
            labels=[*self._labels, "source"],
        )
        for source, count in (("local_compute", stats.prompt_tokens - prefix.hits), ("local_cache_hit", prefix.hits)):
            sources.add_metric([*self._labels.values(), source], count)
        yield sources
        yield self._counter("generation_tokens", "Generated tokens.", stats.generated_tokens)
        yield self._counter("num_preemptions", "Requests sent back to the queue.", stats.preemptions)
        yield from self._prefix_losses(prefix)
        if stats.acceptance.verified:
            yield from self._drafts(stats)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success

    def _prefix_losses(self, prefix: HitCounts) -> Iterator[Metric]:
        """What was in the cache, and why it was not all used."""
        for name, words, value in (
            ("lost_last", "matched, but computed: the last prompt token always is", prefix.lost_last),
            ("lost_rounding", "in a cached page that differs further on", prefix.lost_rounding),
            ("shareable", "hits and both kinds of loss", prefix.shareable),
        ):
            yield self._counter(f"prefix_cache_{name}", f"Prompt tokens {words}.", value, prefix="dcpjax")

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        """Mean acceptance length is 1 + accepted / drafts."""
        yield self._counter("spec_decode_num_drafts", "Decode rows that verified drafts.", stats.acceptance.num_rows)
        yield self._counter("spec_decode_num_draft_tokens", "Drafts verified.", sum(stats.acceptance.verified))
        yield self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.", sum(stats.acceptance.accepted))
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by place.",
            labels=[*self._labels, "position"],
        )
        for place, accepted in enumerate(stats.acceptance.accepted):
            places.add_metric([*self._labels.values(), str(place)], accepted)
        yield places

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", words, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, words: str, value: float, prefix: str = "vllm") -> Metric:
        family = CounterMetricFamily(f"{prefix}:{name}", words, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, … up to `most`."""
    values, power = [], 1
    while power <= most:
        values += [step * power for step in (1, 2, 5) if step * power <= most]
        power *= 10
    return tuple(values)
