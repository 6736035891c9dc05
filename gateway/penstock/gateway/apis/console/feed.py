"""The feed of the console: what changes of the page that is looked at, twice a second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.engines.client.engine import Engine
from penstock.engines.contract.engine_view import EngineView
from penstock.engines.contract.step_ring import StepRow
from penstock.engines.errors import PenstockError
from penstock.gateway.apis.console.views import ConsoleSources, Look
from penstock.gateway.requests.request_watch import RequestChoice

_INTERVAL = 0.5
"""Seconds between two updates."""
_SLOW = 2
"""Every how many updates longer lists are looked at."""
_ENGINE_SECONDS = 0.9
"""For which what an engine has shown is good enough for another console."""
_PATIENCE = 2.0
"""Seconds that an engine may take to show something."""
_MOST_REQUESTS = 100
_MOST_STEPS = 120
"""Of one update."""


@dataclass(slots=True)
class _EngineLook:
    """What an engine has shown, for all consoles that look at it."""

    at: float = -1e9
    views: list[EngineView | None] = field(default_factory=list)
    steps: list[deque[StepRow]] = field(default_factory=list)
    """The newest of each of its processes."""
    problem: str = ""
    task: asyncio.Task[list[EngineView | None]] | None = None
    """Under way: an engine that hangs is not called again."""


class ConsoleFeed:
    def __init__(self, sources: ConsoleSources, *, may_act: bool) -> None:
        """`may_act`: an admin's key may change something."""
        self._sources = sources
        self._may_act = may_act
        self._engines: dict[str, _EngineLook] = {}

    async def events(self, look: Look, check: Callable[[], None]) -> AsyncIterator[dict[str, str]]:
        """Until the server ends. Each event has the sections that have changed. Raises what `check` does, which comes
        before each."""
        stream, number = _Progress(), 0
        while True:
            check()
            sections = await self._sections(look, stream, slow=number % _SLOW == 0)
            changed = stream.changed(sections)
            if changed:
                yield {"event": "update", "data": msgspec.json.encode(changed).decode()}
            if self._sources.has_ended:
                return
            number += 1
            await asyncio.sleep(_INTERVAL)

    async def _sections(self, look: Look, stream: _Progress, *, slow: bool) -> dict[str, Any]:
        sources = self._sources
        sections: dict[str, Any] = {"server": self._server(), "figures": sources.figures()}
        if not slow:
            return sections
        sections["models"] = sources.rows_of_models()
        if look.view == "live":
            sections["engine"] = await self._engine(look.model, stream)
        if look.view in ("live", "request"):
            watched = await sources.requests.look(
                RequestChoice(limit=_MOST_REQUESTS, since=stream.ended_at, request=look.request)
            )
            stream.ended_at = max((row.ended_at for row in watched.ended), default=stream.ended_at)
            sections["requests"] = watched
        if look.view not in ("live", "request", "playground"):
            sections["traffic"] = sources.rules()
            sections["memory"] = sources.memory()
        return sections

    def _server(self) -> dict[str, Any]:
        version = {"version": self._sources.version, "may_act": self._may_act}
        return version | self._sources.server() | {"fronts": self._sources.requests.has_fronts}

    async def _engine(self, name: str, stream: _Progress) -> dict[str, Any]:
        entry = self._sources.engine_of(name)
        if entry is None:
            return {"model": "", "parts": [], "problem": "No language model is loaded."}
        name, model = entry
        look = self._engines.setdefault(name, _EngineLook())
        if time.monotonic() - look.at > _ENGINE_SECONDS:
            await _look_at(model.engine, look)
        known = {row[0] for row in self._sources.dataplane.models.loaded()}
        for gone in [other for other in self._engines if other not in known]:
            del self._engines[gone]
        steps = [[row for row in rows if row.scheduled_at > stream.step_at][-_MOST_STEPS:] for rows in look.steps]
        stream.step_at = max((row.scheduled_at for rows in steps for row in rows), default=stream.step_at)
        parts = [None if view is None else _part(view, rows) for view, rows in zip(look.views, steps, strict=True)]
        return {"model": name, "parts": parts, "problem": look.problem}


class _Progress:
    """How far one console has been told."""

    def __init__(self) -> None:
        self.ended_at = 0.0
        self.step_at = 0.0
        self._sent: dict[str, bytes] = {}

    def changed(self, sections: dict[str, Any]) -> dict[str, msgspec.Raw]:
        changed: dict[str, msgspec.Raw] = {}
        for name, section in sections.items():
            encoded = msgspec.json.encode(section)
            if self._sent.get(name) != encoded:
                self._sent[name] = encoded
                changed[name] = msgspec.Raw(encoded)
        return changed


async def _look_at(engine: Engine, look: _EngineLook) -> None:
    """Calls the engine, unless it has not answered the last call."""
    if look.task is None:
        since = [rows[-1].number if rows else 0 for rows in look.steps]
        look.task = asyncio.create_task(engine.inspect(since))
    done, _ = await asyncio.wait((look.task,), timeout=_PATIENCE)
    look.at = time.monotonic()
    if not done:
        look.problem = "The engine does not answer."
        return
    task, look.task = look.task, None
    try:
        look.views, look.problem = task.result(), ""
    except PenstockError as error:
        look.views, look.problem = [], error.message
    look.steps = [*look.steps, *(deque[StepRow](maxlen=_MOST_STEPS) for _ in look.views)][: len(look.views)]
    for view, rows in zip(look.views, look.steps, strict=True):
        rows.extend(() if view is None else view.steps)


def _part(view: EngineView, steps: list[StepRow]) -> dict[str, Any]:
    return {
        "now": view.now,
        "requests": view.requests,
        "more_requests": view.more_requests,
        "target": view.target_seconds,
        "seats": view.seats,
        "step_tokens": view.step_tokens,
        "blocks": view.blocks,
        "steps": [
            (row.number, row.scheduled_at, row.seconds, row.num_prompt_tokens, row.num_tokens, row.num_requests)
            for row in steps
        ],
    }
