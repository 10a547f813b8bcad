"""Metrics of our own about devices: what was compiled, what memory holds, whose rows the running requests' tokens are."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dcpjax.host.report import DeviceState
from dcpjax.layout import CacheLayout


class DeviceMetrics(Collector):
    """labels: of every sample. state, lengths: asked at every scrape; tokens that each running request has in the cache.
    layout: how they are dealt out to ranks."""

    def __init__(
        self,
        labels: Mapping[str, str],
        state: Callable[[], DeviceState],
        lengths: Callable[[], Iterable[int]],
        layout: CacheLayout,
    ):
        self._labels = labels
        self._state = state
        self._lengths = lengths
        self._layout = layout

    def collect(self) -> Iterator[Metric]:
        """Everything, as it is now."""
        state, lengths = self._state(), tuple(self._lengths())
        seconds = CounterMetricFamily(
            "dcpjax:compile_seconds", "Time spent on compiling ahead.", labels=list(self._labels)
        )
        seconds.add_metric(list(self._labels.values()), state.compile_seconds)
        yield seconds
        yield self._gauge("compiled_shapes", "Step programs compiled.", None, {"": state.compiled_shapes})
        yield self._gauge("device_memory_bytes", "Bytes in use, by device.", "device", state.memory)
        ranks = range(self._layout.shards)
        held = {str(rank): sum(self._layout.local_len(length, rank) for length in lengths) for rank in ranks}
        yield self._gauge("kv_tokens_per_rank", "Tokens of running requests whose rows a rank holds.", "rank", held)

    def _gauge(self, name: str, words: str, label: str | None, values: Mapping[str, float]) -> Metric:
        """A value for each of the label's; without a label, of the one there is."""
        family = GaugeMetricFamily(f"dcpjax:{name}", words, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return family
