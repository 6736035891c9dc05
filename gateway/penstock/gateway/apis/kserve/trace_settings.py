"""The settings of the trace extension: Triton's names, values and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError

_UINT32_MAX = (1 << 32) - 1
_INT32_MAX = (1 << 31) - 1
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_MODE = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """What is set, for everything or for one model. None: as for everything."""

    trace_level: tuple[str, ...] | None = None
    trace_rate: int | None = None
    """Of this many requests one is traced; 0: none."""
    trace_count: int | None = None
    """Traces that are still to be made; -1: no end."""
    log_frequency: int | None = None
    """Traces to a file; 0: all into one."""

    def over(self, other: TraceSettings) -> TraceSettings:
        """These where they are set, the other ones elsewhere."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return TraceSettings(**{k: getattr(other, k) if v is None else v for k, v in own.items()})

    @property
    def empty(self) -> bool:
        return self == TraceSettings()


DEFAULTS = TraceSettings(trace_level=("OFF",), trace_rate=1000, trace_count=-1, log_frequency=0)


def shown(settings: TraceSettings, file: str) -> dict[str, str | list[str]]:
    """Complete settings as clients see them, in Triton's order."""
    return {
        "trace_level": list(settings.trace_level or ("OFF",)),
        "trace_rate": str(settings.trace_rate),
        "trace_count": str(settings.trace_count),
        "log_frequency": str(settings.log_frequency),
        "trace_file": file,
        "trace_mode": _MODE,
    }


def changes(values: Mapping[str, object]) -> dict[str, Any]:
    """The fields of TraceSettings that these values of a request set (None: clears). Protocols carry values as strings,
    HTTP bare and gRPC in a list; null and an empty list clear.

    Raises InvalidRequestError for bad values and, unlike Triton, for unknown settings; UnsupportedError for
    `trace_file` and the mode `opentelemetry`.
    """
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if name == "trace_file":
            raise UnsupportedError("trace file location can not be updated through network protocol")
        if name not in ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_mode"):
            raise InvalidRequestError(f"unknown trace setting '{name[:64]}'")
        texts = _texts(name, value)
        if name == "trace_mode":
            _check_mode(texts)
        elif not texts:
            settings[name] = None
        elif name == "trace_level":
            settings[name] = _levels(texts)
        else:
            settings[name] = _number(name, texts)
    return settings


def _texts(name: str, value: object) -> list[str]:
    items = (
        [] if value is None else list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    )
    if not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(f"the trace setting '{name}' must be a string")
    return [str(item) for item in items]


def _check_mode(texts: list[str]) -> None:
    if texts not in ([], [_MODE]):
        raise UnsupportedError(f"trace_mode '{texts[0][:64]}' is not supported, only '{_MODE}' is")


def _levels(texts: list[str]) -> tuple[str, ...]:
    unknown = next((text for text in texts if text not in _LEVELS), None)
    if unknown is not None:
        raise InvalidRequestError(f"unknown trace level '{unknown[:64]}', expecting one of {', '.join(_LEVELS)}")
    if "OFF" in texts and len(texts) > 1:
        raise InvalidRequestError("Expect only one trace level 'OFF' is specified")
    return tuple(level for level in _LEVELS if level in texts)


def _number(name: str, texts: list[str]) -> int:
    text = texts[0][:32]
    if len(texts) > 1:
        raise InvalidRequestError(f"the trace setting '{name}' must be one value")
    low, high = (-1, _INT32_MAX) if name == "trace_count" else (0, _UINT32_MAX)
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidRequestError(f"Unable to parse '{name}', got: {text}")
    if name == "trace_count" and int(text) < low:
        raise InvalidRequestError(f"Unable to parse '{name}'. Expecting value >= -1, got:{text}")
    if not low <= int(text) <= high:
        raise InvalidRequestError(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {text}")
    return int(text)
