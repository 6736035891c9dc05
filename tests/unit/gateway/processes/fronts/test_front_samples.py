"""Metrics of several processes as those of one server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock.classic.statistics import ModelStatistics
from penstock.gateway.metrics.request_metrics import Histogram
from penstock.gateway.processes.fronts.counts import Samples, Sums, add, samples_of, take


def page(requests: Counter[str], running: int, histogram: Histogram) -> list[Samples]:
    counter = CounterMetricFamily("requests", "Requests.", labels=["route"])
    for route, number in requests.items():
        counter.add_metric([route], number)
    families = [counter, GaugeMetricFamily("running", "Running.", value=running), *histogram.samples({"model": "m"})]
    return samples_of(families)


@dataclass
class Process:
    requests: Counter[str] = field(default_factory=Counter)
    running: int = 0
    seconds: Histogram = field(default_factory=lambda: Histogram("seconds", "Seconds.", (1, 2)))
    reported: list[Samples] | None = None

    def report(self) -> None:
        self.reported = page(self.requests, self.running, self.seconds)


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["request /a", "request /b", "end", "report", "die"])), max_size=60
)


@given(EVENTS)
def test_sums_never_fall_and_gauges_are_of_those_that_live(events: list[tuple[int, str]]) -> None:
    processes, ended = [Process() for _ in range(3)], Sums()
    before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for number, event in events:
        process = processes[number]
        match event.split():
            case ["request", route]:
                process.requests[route] += 1
                process.running += 1
                process.seconds.observe(1.5)
            case ["end"]:
                process.running = max(0, process.running - 1)
            case ["report"]:
                process.report()
            case ["die"]:
                if process.reported is not None:
                    ended.add(process.reported, ended=True)
                processes[number] = Process()
        sums = Sums()
        sums.add(ended.samples())
        for each in processes:
            sums.add(each.reported or [])
        found = {(name, labels): value for family in sums.samples() for name, labels, value in family.values}
        for key, value in before.items():
            assert key[0] == "running" or found[key] >= value
        assert found.get(("running", ()), 0) == sum(
            value
            for each in processes
            for family in each.reported or ()
            if family.name == "running"
            for _, _, value in family.values
        )
        before = found


def test_a_page_of_two_processes_is_one() -> None:
    first, second = Process(Counter({"/a": 2}), 1), Process(Counter({"/a": 3, "/b": 1}), 2)
    first.seconds.observe(0.5)
    second.seconds.observe(1.5, 2)
    sums = Sums()
    for process in (first, second):
        process.report()
        sums.add(process.reported or [])
    metrics = sums.metrics()
    values = {
        (sample.name, *sample.labels.values()): sample.value for metric in metrics.values() for sample in metric.samples
    }
    assert values["requests_total", "/a"] == 5
    assert values["requests_total", "/b"] == 1
    assert values["running",] == 3
    assert values["seconds_bucket", "1", "m"] == 1 or values["seconds_bucket", "m", "1"] == 1
    assert values["seconds_sum", "m"] == 3.5
    assert metrics["seconds"].type == "histogram"


def test_the_largest_lag_counts() -> None:
    sums = Sums()
    for value in (0.25, 0.5, 0.125):
        sums.add(samples_of([GaugeMetricFamily("penstock_event_loop_lag_seconds", "Lag.", value=value)]))
    [family] = sums.samples()
    assert family.values == [("penstock_event_loop_lag_seconds", (), 0.5)]


def count(statistics: ModelStatistics) -> None:
    statistics.executed(2, 10, 20, 30)
    statistics.succeeded(
        requests=2, inferences=2, total=100, queue=10, compute_input=1, compute_infer=2, compute_output=3
    )
    statistics.failed(7, "REJECTED")
    statistics.responses[1].success.add(5)
    statistics.pending = 3


def test_statistics_travel_as_what_was_counted_since() -> None:
    owner, front, whole = ModelStatistics(), ModelStatistics(), ModelStatistics()
    for statistics in (owner, front, front, whole, whole, whole):
        count(statistics)
    count(whole)
    counts = take(front)
    count(front)
    add(owner, counts)
    add(owner, take(front))
    assert take(front) == {}
    assert front.pending == 3
    owner.last_inference_ms = whole.last_inference_ms
    assert owner == whole
