"""The public names of a server, wired to the places where names become models, and their metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.apis.pooling.kserve_model import is_offered
from penstock.gateway.configuration.traffic_rules import TrafficRule
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.traffic.routing import TrafficRouting
from penstock.gateway.models.traffic.shadows import Result
from penstock.gateway.models.traffic.shift import ShiftState
from penstock.gateway.models.traffic.store import TrafficStore
from penstock.gateway.models.traffic.table import PublicName, TargetChoice, TrafficTable
from penstock.gateway.requests.context import Principal
from penstock.gateway.transports.http.inner_request import InnerRequest
from penstock.gateway.transports.http.routes import Handle
from penstock.gateway.transports.http.settings import AppSettings

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


_ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class TrafficService:
    def __init__(
        self,
        rules: Iterable[TrafficRule],
        models: ModelStore,
        dataplane: DataPlane,
        on_demand: OnDemand | None = None,
    ) -> None:
        self.table = TrafficTable(rules)
        self.models = TrafficStore(models, self.table, self._in_other_apis, on_demand)
        """For the KServe fronts, in place of `models`."""
        self.metrics = TrafficMetrics(self.table)
        self._routing = TrafficRouting(self.table, dataplane, self.models, on_demand)
        self._catalogue = dataplane.models
        self.table.on_change(self._wire)

    def answer_by(self, endpoints: Mapping[str, Handle], settings: AppSettings) -> None:
        """By these, which are known by their routes, the server asks shadows what it asks another server."""

        def ask(api: str, body: bytes, choice: TargetChoice, tenant: str) -> InnerRequest:
            route = _ROUTES[api]
            return InnerRequest(endpoints[route], route, body, Principal(tenant=tenant), settings.drain, routed=choice)

        self._routing.ask_inside = ask

    def _in_other_apis(self, name: str) -> bool:
        """Whether the other APIs have a model of this name that KServe never has."""
        model = self._catalogue.model(name)
        return model is not None and not (isinstance(model, PoolingModel) and is_offered(model))

    def _wire(self) -> None:
        """Before the first rule nobody asks here."""
        if self.table.names:
            self._catalogue.traffic = self._routing
