"""The views of a server that the console shows: its models, engines, requests and traffic rules."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.apis.operator_views import snapshot
from penstock.gateway.models.entries import upstream_of
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.models.memory.budget import MemoryBudget
from penstock.gateway.models.traffic.routes import shown as shown_rule
from penstock.gateway.models.traffic.table import TrafficTable
from penstock.gateway.requests.call import DrainState
from penstock.gateway.requests.request_watch import ServerRequests
from penstock.gateway.requests.server_health import ServerHealth

_MOST_MODELS = 500
_MOST_EVENTS = 50


@dataclass(frozen=True, slots=True)
class Look:
    """What one console looks at."""

    view: str
    """The page; "" or an unknown one: the overview."""
    model: str
    """Whose engine; "": the first one's."""
    request: str
    """Whose details; "": none's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSources:
    """What the console looks at. Nothing is computed until one of these methods is called."""

    version: str
    dataplane: DataPlane
    models: ModelStore
    traffic: TrafficTable
    budget: MemoryBudget
    health: ServerHealth
    drain: DrainState
    requests: ServerRequests

    def server(self) -> dict[str, Any]:
        return {
            "live": self.health.live(),
            "ready": self.health.ready(),
            "leaving": self.drain.leaving,
            "in_flight": self.drain.in_flight,
        }

    @property
    def has_ended(self) -> bool:
        """The server drains, and nothing is in flight any more."""
        return self.drain.draining and not self.drain.in_flight

    def figures(self) -> dict[str, Any]:
        """Each engine's counters and gauges, and when they were read."""
        engines = snapshot(self.dataplane)
        return {"at": time.monotonic(), "engines": {name: _without_zeros(state) for name, state in engines.items()}}

    def rows_of_models(self) -> list[dict[str, Any]]:
        """One for each version, whatever its state."""
        loading = self.health.loading()
        facts = {**self._facts_of_upstreams(), **self._facts_of_encoders(), **self._facts_of_generators()}
        rows: list[dict[str, Any]] = []
        for entry in self.models.index(ready=False):
            state = {"name": entry.name, "version": entry.version, "state": entry.state or "", "reason": entry.reason}
            rows.append({"kinds": ["tensors"]} | facts.get(entry.name, {}) | state)
        listed = {row["name"] for row in rows}
        for name in (*facts, *loading):
            if name not in listed:
                listed.add(name)
                state = {"name": name, "version": "", "state": "LOADING" if name in loading else "READY", "reason": ""}
                rows.append({"kinds": []} | state | facts.get(name, {}))
        for row in rows:
            row["loading"] = loading.get(row["name"], "")
        return rows[:_MOST_MODELS]

    def _facts_of_generators(self) -> dict[str, dict[str, Any]]:
        return {name: _facts(name, model) for model in self.dataplane.models.known() for name in model.names}

    def _facts_of_encoders(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"kinds": ["pools"], "capabilities": list(model.capabilities)}
            | ({"runner": model.source.info.runner} if model.loaded else {})
            for model in self.dataplane.models.pooling_models()
            for name in model.names
        }

    def _facts_of_upstreams(self) -> dict[str, dict[str, Any]]:
        listed = ((name, upstream_of(served)) for name, served in self.dataplane.models.listed())
        return {
            name: {"kinds": ["upstream"], "capabilities": list(upstream.apis)}
            for name, upstream in listed
            if upstream is not None
        }

    def memory(self) -> dict[str, Any]:
        return {"limit": self.budget.limit, "models": self.budget.rows()}

    def rules(self) -> dict[str, Any]:
        rules = [shown_rule(public) for _, public in sorted(self.traffic.names.items())]
        return {"rules": rules, "events": list(self.traffic.events)[-_MOST_EVENTS:]}

    def engine_of(self, name: str) -> tuple[str, LoadedModel] | None:
        """The loaded language model with this name, or the first one."""
        loaded: Sequence[tuple[str, LoadedModel]] = self.dataplane.models.loaded()
        by_name: Mapping[str, LoadedModel] = dict(loaded)
        if name in by_name:
            return name, by_name[name]
        return loaded[0] if loaded else None


def _without_zeros(state: Mapping[str, Any]) -> dict[str, Any]:
    """Most figures of most engines are of what they do not have."""
    return {name: value for name, value in state.items() if value}


def _facts(name: str, model: LoadedModel) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kinds": ["generates"],
        "names": list(model.names),
        "adapters": [adapter.name for adapter in model.adapters],
        "asleep": model.sleep.asleep,
        "ready": model.ready,
        "failed": model.engine.failed,
        "restarts": getattr(model.engine, "num_restarts", 0),
    }
    if model.loaded:
        info = model.engine.info
        facts |= {
            "runner": info.runner,
            "context_length": info.context_length,
            "block_size": info.block_size,
            "seats": model.max_num_seqs,
            "capabilities": model.describe(name).capabilities,
        }
    return facts
