"""Counts of what loading on demand has done, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily


class Counts:
    """A source of metrics."""

    def __init__(self) -> None:
        self.waiting = 0
        self.refused: Counter[str] = Counter()
        """Requests that did not wait any longer: "full", "time"."""
        self.failed: Counter[tuple[str, str]] = Counter()
        """By model and "error" or "no_room"."""
        self.unloads: Counter[tuple[str, str]] = Counter()
        """By model and "room" or "idle"."""
        self._loads: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()

    def loaded(self, name: str, seconds: float) -> None:
        self._loads[name] += 1
        self._seconds[name] += seconds  # type: ignore[assignment]  # a Counter of floats

    def collect(self) -> Iterator[Metric]:
        text = "Requests that wait for their model to be loaded."
        yield GaugeMetricFamily("penstock_model_waiting_requests", text, value=self.waiting)
        text = "Requests that did not wait for their model any longer, by why: full, time."
        refused = CounterMetricFamily("penstock_model_waiting_refused", text, labels=["reason"])
        for reason in ("full", "time"):
            refused.add_metric([reason], self.refused[reason])
        yield refused
        text = "Seconds that loads on demand took, waiting for room included."
        loads = SummaryMetricFamily("penstock_model_demand_load_seconds", text, labels=["model"])
        for name, count in sorted(self._loads.items()):
            loads.add_metric([name], count, self._seconds[name])
        yield loads
        text = "Loads on demand that failed, by why: error, no_room."
        yield _by_model("penstock_model_demand_load_failures", text, self.failed)
        text = "Models unloaded by the server, by why: room for another, idle."
        yield _by_model("penstock_model_demand_unloads", text, self.unloads)


def _by_model(name: str, text: str, counts: Counter[tuple[str, str]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["model", "reason"])
    for (model, reason), count in sorted(counts.items()):
        family.add_metric([model, reason], count)
    return family
