"""The process's Prometheus registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from penstock.gateway.metrics.prometheus_text import Family, render


class Source(Protocol):
    """What has metrics: a language model, for one."""

    def collect(self) -> Iterable[Metric]: ...


class OtherProcesses(Protocol):
    """Other processes of this server."""

    async def refresh(self) -> None:
        """Asks them for what they have counted."""

    def merge(self, families: dict[str, Metric]) -> None:
        """Adds it to these families, by name."""


class Metrics:
    """The process's registry: the usual process metrics, and the families of all sources, each family once."""

    def __init__(self, sources: Callable[[], Iterable[Source]], more: Callable[[], Iterable[Family]]) -> None:
        """`more`: families that prometheus-client would rename."""
        self._sources = sources
        self._more = more
        self.other_processes: OtherProcesses | None = None
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for source in self._sources():
            for family in source.collect():
                known = merged.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        if self.other_processes is not None:
            self.other_processes.merge(merged)
        return iter(merged.values())

    async def page(self) -> tuple[bytes, str]:
        """What `render` gives, with the newest of other processes."""
        if self.other_processes is not None:
            await self.other_processes.refresh()
        return self.render()

    def render(self) -> tuple[bytes, str]:
        """(exposition text, content type)."""
        return generate_latest(self._registry) + render(self._more()), CONTENT_TYPE_LATEST
