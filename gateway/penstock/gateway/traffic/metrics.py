"""Prometheus families of public names. Labels are names from rules, never a client's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.gateway.traffic.shadows import Result
from penstock.gateway.traffic.shift import ShiftState
from penstock.gateway.traffic.table import PublicName, TrafficTable

_LABELS = ["name", "target"]


class TrafficMetrics:
    """A source of metrics; it has none while there are no rules."""

    def __init__(self, table: TrafficTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        names = sorted(self._table.names.items())
        if not names:
            return
        yield from _targets(names)
        yield from _shifts(names)
        yield from _shadows(names)


def _targets(names: list[tuple[str, PublicName]]) -> Iterator[Metric]:
    share = GaugeMetricFamily("penstock_traffic_share", "Part of a name's requests that a target gets.", labels=_LABELS)
    text = "Requests that a target has accepted."
    accepted = CounterMetricFamily("penstock_traffic_accepted", text, labels=_LABELS)
    text = "Requests that have ended at a target."
    ended = CounterMetricFamily("penstock_traffic_ended", text, labels=[*_LABELS, "outcome"])
    for name, public in names:
        for target, part in public.route.shares().items():
            share.add_metric([name, target], part)
        for target, counts in public.route.counts.items():
            accepted.add_metric([name, target], counts.accepted)
            for outcome, count in counts.ended.items():
                ended.add_metric([name, target, outcome.value], count)
            yield from counts.seconds.samples({"name": name, "target": target})
    yield from (share, accepted, ended)


def _shifts(names: list[tuple[str, PublicName]]) -> Iterator[Metric]:
    text = "1 for the state that a shift is in."
    family = GaugeMetricFamily("penstock_traffic_shift_state", text, labels=["name", "to", "state"])
    for name, public in names:
        shift = public.route.shift
        if shift is not None:
            for state in ShiftState:
                family.add_metric([name, shift.rule.to, state.value], state is shift.state)
    yield family


def _shadows(names: list[tuple[str, PublicName]]) -> Iterator[Metric]:
    labels = ["name", "shadow"]
    results = CounterMetricFamily(
        "penstock_traffic_shadow", "Requests that were sent to a shadow, or were to be.", labels=[*labels, "result"]
    )
    text = "Requests that a shadow has now."
    in_flight = GaugeMetricFamily("penstock_traffic_shadow_in_flight", text, labels=labels)
    for name, public in names:
        shadows = public.shadows
        if shadows is not None:
            in_flight.add_metric([name, shadows.rule.id], shadows.in_flight)
            for result in Result:
                results.add_metric([name, shadows.rule.id, result.value], shadows.results[result])
    yield from (results, in_flight)
