"""Traces of single requests: which ones are traced, and what of them is written."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.classic.tensors import Tensor
from penstock.gateway.apis.kserve.trace_settings import DEFAULTS, TraceSettings, changes, shown
from penstock.gateway.requests.changes import Changes

if TYPE_CHECKING:
    from penstock.classic.messages import InferRequest
logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_FLUSH_BYTES = 1 << 16
_MOST_BYTES = 64 << 20
"""Collected for a file of its own; then that file has fewer traces than were asked for."""
_MAX_ELEMENTS = 1 << 16
"""Of a traced tensor; the rest is left out of the trace."""
_MAX_CHILDREN = 1024
"""Of a request: traces that are kept until its own is written; later ones are written alone."""


class RequestTrace:
    """The trace of one request (a `messages.Trace`). Written when it is finished; safe to mark from any thread."""

    __slots__ = (
        "_above",
        "_children",
        "_events",
        "_kept",
        "_numbers",
        "_sampler",
        "_source",
        "_tensors",
        "_timestamps",
        "id",
        "model",
        "parent",
        "request_id",
        "version",
    )

    def __init__(
        self, sampler: _Sampler, numbers: Iterator[int], model: str, version: int, request_id: str, parent: int = 0
    ) -> None:
        """`numbers` gives each trace its own; `parent` is the number of the trace that it belongs to."""
        self._numbers = numbers
        self.id = next(numbers)
        self.parent = parent
        self.model = model
        self.version = version
        self.request_id = request_id
        levels = sampler.settings.trace_level or ()
        self._timestamps = "TIMESTAMPS" in levels
        self._tensors = "TENSORS" in levels
        self._source = sampler
        self._sampler: _Sampler | None = sampler
        self._events: list[dict[str, object]] = []
        self._children: list[RequestTrace] = []
        self._above = False
        """There is one that it is to be written with."""
        self._kept = itertools.count()
        """Counts the children of the whole request."""

    def mark(self, event: str, ns: int) -> None:
        """A timestamp, in nanoseconds of time.monotonic_ns()."""
        if self._timestamps:
            self._events.append({"id": self.id, "timestamps": [{"name": event, "ns": ns}]})

    def mark_now(self, event: str) -> None:
        if self._timestamps:
            self.mark(event, time.monotonic_ns())

    def child(self, model: str, version: int) -> RequestTrace:
        """Written with this one, also after the server's settings have changed."""
        trace = RequestTrace(self._source, self._numbers, model, version, self.request_id, self.id)
        trace._kept = self._kept
        if self._sampler is not None and next(self._kept) < _MAX_CHILDREN:
            trace._above = True
            self._children.append(trace)
        trace.mark_now("REQUEST_START")
        return trace

    def include(self, noted: Noted) -> None:
        """What another process has noted of this request and of those that were made for it, which are written with
        this one."""
        for event, ns in noted.marks:
            self.mark(event, ns)
        for model, version, of_child in noted.children:
            child = RequestTrace(self._source, self._numbers, model, version, self.request_id, self.id)
            child.include(of_child)
            child._sampler = None
            self._children.append(child)

    def inputs(self, request: InferRequest) -> None:
        """The request's tensors, where the level asks for tensors. Makes this the request's trace."""
        request.trace = self
        self.request_id = request.id
        self._tensor_events("TENSOR_QUEUE_INPUT", request.inputs.values())

    def outputs(self, tensors: Iterable[Tensor]) -> None:
        """A response's tensors."""
        self._tensor_events("TENSOR_BACKEND_OUTPUT", tensors)

    def finish(self) -> None:
        """Writes the trace with those that belong to it, or leaves that to the one that it belongs to. Idempotent."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None and not self._above:
            sampler.add([trace._written() for trace in self._family()])

    def _family(self) -> Iterator[RequestTrace]:
        """Those that have ended; the others are written when they do."""
        yield self
        children, self._children = self._children, []
        for child in children:
            child._above = False
            if child._sampler is None:
                yield from child._family()

    def _written(self) -> list[bytes]:
        head: dict[str, object] = {"id": self.id, "model_name": self.model, "model_version": self.version}
        if self.parent:
            head["parent_id"] = self.parent
        if self.request_id:
            head["request_id"] = self.request_id
        return [_encode(event) for event in (head, *self._events)]

    def _tensor_events(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if self._tensors:
            self._events += ({"id": self.id, "activity": activity, "tensor": _tensor(item)} for item in tensors)


class Noted(Protocol):
    """What was noted of a request in another process."""

    @property
    def marks(self) -> Sequence[tuple[str, int]]:
        """Events and nanoseconds of time.monotonic_ns()."""
        ...

    @property
    def children(self) -> Sequence[tuple[str, int, Noted]]:
        """Requests that were made for it: model, version and what was noted."""
        ...


Write = Callable[[str, list[list[bytes]], int], None]
"""Writes traces that belong together: the model whose own settings they follow, "" for the common ones; their events as
JSON objects; the log frequency."""


class _Sampler:
    """Complete settings and the counting that goes with them: for everything, or for one model."""

    def __init__(self, settings: TraceSettings, write: Write, model: str = "", seen: int = 0) -> None:
        self.settings = settings
        self.seen = seen
        self._write = write
        self._model = model
        self._rate = settings.trace_rate or 0
        self._count = settings.trace_count or 0

    @property
    def active(self) -> bool:
        return self.settings.trace_level != ("OFF",) and self._rate > 0 and self._count != 0

    @property
    def current(self) -> TraceSettings:
        """The settings with the traces that are still to be made."""
        return replace(self.settings, trace_count=self._count)

    def sample(self) -> bool:
        if not self.active:
            return False
        self.seen += 1
        return not self.seen % self._rate and self.count()

    def count(self) -> bool:
        """Whether there may be one more trace, which then counts."""
        if self._count == 0:
            return False
        if self._count > 0:
            self._count -= 1
        return True

    def add(self, traces: list[list[bytes]]) -> None:
        self._write(self._model, traces, self.settings.log_frequency or 0)


@dataclass(frozen=True, slots=True)
class SharedTracing:
    """What `Tracing` knows, for a process that traces in its name."""

    file: str
    settings: TraceSettings
    """Complete; for everything."""
    initial: TraceSettings
    models: dict[str, TraceSettings]


class Tracing:
    """The trace extension: settings for everything and for single models, and the traces that they ask for.

    Timestamps are written to `file`, which only the operator names; without one nothing is written. Lives on the event
    loop.
    """

    def __init__(
        self,
        file: str = "",
        settings: TraceSettings = DEFAULTS,
        *,
        write: Write | None = None,
        first_number: int = 1,
    ) -> None:
        """`write`: what writes instead of this process, whose traces have numbers from `first_number` on."""
        self._file = TraceFile(file)
        self._write: Write = write or self._write_to_file
        self._initial = settings.over(DEFAULTS)
        self._global = _Sampler(self._initial, self._write)
        self._own: dict[str, TraceSettings] = {}
        self._models: dict[str, _Sampler] = {}
        self._numbers = itertools.count(first_number)
        self.changes = Changes()
        """Told when settings have changed."""
        self.active = self._global.active
        """False: `start` gives None for every request."""

    def settings(self, model: str = "") -> dict[str, str | list[str]]:
        """By Triton's names and in its order; values are strings, of `trace_level` a list. "" is for everything."""
        return shown(self._models.get(model, self._global).current, self._file.path)

    def update(self, values: Mapping[str, object], model: str = "") -> None:
        """Changes all of `values`, or nothing. Null clears: a model's setting follows the one for everything again,
        and that one the server's start.

        Raises InvalidRequestError and UnsupportedError. Whether there is such a model, the caller has checked.
        """
        changed = changes(values)
        if model:
            own = replace(self._own_settings(model), **changed)
            self._own[model] = own
            if own.empty:
                del self._own[model]
        else:
            defaults = {name: getattr(self._initial, name) for name, value in changed.items() if value is None}
            settings = replace(self._global.current, **{**changed, **defaults})
            self._global = _Sampler(settings, self._write)
        self._rebuild(model)
        self.changes.tell()

    def shared(self) -> SharedTracing:
        """What the server's other processes have to know to trace requests as this one would."""
        own = {model: self._own_settings(model) for model in self._own}
        return SharedTracing(self._file.path, self._global.current, self._initial, own)

    def adopt(self, shared: SharedTracing) -> None:
        """Traces from now on as the process that owns the settings would."""
        self._file.path, self._initial, self._own = shared.file, shared.initial, dict(shared.models)
        before, usual = self._models, self._global.seen
        self._global = _Sampler(shared.settings, self._write, seen=usual)
        self._models = {
            model: _Sampler(own.over(shared.settings), self._write, model, before[model].seen if model in before else 0)
            for model, own in self._own.items()
        }
        self._look_whether_active()

    def keep(self, model: str, traces: list[list[bytes]]) -> None:
        """Traces that another process has made and that belong together; `model` as for Write. They are dropped when
        enough have been made: the processes count for themselves, and may be a few ahead."""
        sampler = self._models.get(model, self._global)
        if sampler.count():
            sampler.add(traces)
        self._look_whether_active()

    def start(self, model: str, version: int, request_id: str = "") -> RequestTrace | None:
        """The trace of a new request, if it is to be traced. The caller finishes it."""
        if not self.active:
            return None
        sampler = self._models.get(model, self._global)
        return RequestTrace(sampler, self._numbers, model, version, request_id) if sampler.sample() else None

    def close(self) -> None:
        """Writes what has been collected. At the end of the server."""
        self._file.flush()

    def _own_settings(self, model: str) -> TraceSettings:
        """What the model sets itself, with the traces that are still to be made."""
        own, sampler = self._own.get(model, TraceSettings()), self._models.get(model)
        if sampler is None or own.trace_count is None:
            return own
        return replace(own, trace_count=sampler.current.trace_count)

    def _rebuild(self, model: str) -> None:
        """The samplers that a change concerns: the model's, or all models' when the one for everything changed."""
        for name in (model,) if model else tuple(self._own):
            own = self._own.get(name) if model else self._own_settings(name)
            self._models.pop(name, None)
            if own is not None:
                self._models[name] = _Sampler(own.over(self._global.current), self._write, name)
        self._look_whether_active()

    def _look_whether_active(self) -> None:
        self.active = self._global.active or any(sampler.active for sampler in self._models.values())

    def _write_to_file(self, model: str, traces: list[list[bytes]], log_frequency: int) -> None:
        self._file.add([event for events in traces for event in events], log_frequency)


def _tensor(tensor: Tensor) -> dict[str, str]:
    flat = tensor.array.ravel()[:_MAX_ELEMENTS]
    if tensor.datatype == "BYTES":
        data = ",".join(f'"{item.decode(errors="replace") if isinstance(item, bytes) else item}"' for item in flat)
    elif tensor.datatype == "BOOL":
        data = ",".join("1" if item else "0" for item in flat.tolist())
    else:
        data = ",".join(map(str, flat.tolist()))
    shape = ",".join(map(str, tensor.array.shape))
    return {"name": tensor.name, "data": data, "shape": shape, "dtype": tensor.datatype}


class TraceFile:
    """Collects finished traces, in Triton's JSON format: an array of events to a file. With a `log_frequency` of n,
    every n traces make a file of their own, `<path>.0`, `<path>.1` and so on; without, all go into `<path>`, which is
    written to now and then and is valid JSON each time.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._index = 0
        self._traces = 0
        self._events: list[bytes] = []
        self._size = 0
        self._written = 0

    def add(self, events: Sequence[bytes], log_frequency: int) -> None:
        """One finished trace: its events as JSON objects."""
        if not self.path:
            return
        self._events += events
        self._traces += 1
        self._size += sum(map(len, events))
        if log_frequency:
            if self._traces >= log_frequency or self._size >= _MOST_BYTES:
                self._write(f"{self.path}.{self._index}", b"[" + b",".join(self._events) + b"]", append=False)
                self._index += 1
        elif self._size >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what has been collected, into `<path>`."""
        if not self._events:
            return
        data = (b",\n" if self._written else b"[") + b",\n".join(self._events) + b"]\n"
        self._write(self.path, data, append=bool(self._written))
        self._written += 1

    def _write(self, path: str, data: bytes, *, append: bool) -> None:
        self._events, self._traces, self._size = [], 0, 0
        try:
            with open(path, "r+b" if append else "wb") as file:
                if append:
                    file.seek(-len(b"]\n"), os.SEEK_END)
                file.write(data)
        except OSError as error:
            logger.warning("traces were lost: cannot write %s: %s", path, error.strerror)
