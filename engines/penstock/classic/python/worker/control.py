"""The control of models, pb_utils.Logger and pb_utils.MetricFamily: what a model tells and asks the server beside
requests.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from . import host
from .errors import TritonModelException, flag, of_type, text
from .wire import Packer

model_dir: list[str] = []
"""The folder of the version that this process runs."""


def get_model_dir() -> str:
    return model_dir[0] if model_dir else ""


def load_model(
    model_name: str | bytes, config: str | bytes = "", files: Mapping[str | bytes, bytes] | None = None
) -> None:
    """Loads or reloads a model. `files`: `file:<version>/<name>` to contents; they need a config.

    Raises TritonModelException when it cannot be loaded.
    """
    name, override = text(model_name, "model_name"), text(config, "config")
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{name}', files should be a dictionary of file paths and file contents"
        )
    models = (
        {text(path, "a file's path"): of_type(data, bytes, "a file's content") for path, data in files.items()}
        if files
        else {}
    )

    def pack(packer: Packer) -> list[object]:
        return [name, override, {path: packer.data(data) for path, data in models.items()}]

    host.connected().ask("load", pack).result()


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:
    name, also = text(model_name, "model_name"), flag(unload_dependents, "unload_dependents")
    host.connected().ask("unload", lambda _: [name, also]).result()


def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
    """In this version; "": in any."""
    name, version = text(model_name, "model_name"), text(model_version, "model_version")
    return bool(host.connected().ask("model_ready", lambda _: [name, version]).result().fields[0])


class LogLevel(enum.IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: LogLevel = LogLevel.INFO) -> None:
        """Raises TypeError for a message that is no text, and for a level that is no LogLevel."""
        line, number = text(message, "message"), int(of_type(level, LogLevel, "level"))
        if host.current:
            host.current[0].tell("log", number, line)
        else:
            print(line, flush=True)

    @staticmethod
    def log_info(message: str | bytes) -> None:
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        Logger.log(message, LogLevel.VERBOSE)


class MetricKind(enum.IntEnum):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One set of labels of a family. Its operations are told to the server and do not wait for it."""

    def __init__(
        self, kind: MetricKind, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._kind = kind
        self._number: int = _created("Metric", "metric", kind.name, name, description, labels, buckets)

    def increment(self, value: float) -> None:
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException(f"Failed to increment metric value: {self._named} does not support Increment")
        if self._kind is MetricKind.COUNTER and value < 0:
            raise TritonModelException(
                f"Failed to increment metric value: {self._named} can only be incremented monotonically by "
                "non-negative values."
            )
        self._tell("increment", value)

    def set(self, value: float) -> None:
        if self._kind is not MetricKind.GAUGE:
            raise TritonModelException(f"Failed to set metric value: {self._named} does not support Set")
        self._tell("set", value)

    def observe(self, value: float) -> None:
        if self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException(f"Failed to observe metric value: {self._named} does not support Observe")
        self._tell("observe", value)

    def value(self) -> float:
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException(f"Failed to get metric value: {self._named} does not support Value")
        return float(host.connected().ask("metric_value", lambda _: [self._number]).result().fields[0])

    @property
    def _named(self) -> str:
        return f"TRITONSERVER_METRIC_KIND_{self._kind.name}"

    def _tell(self, verb: str, value: float) -> None:
        number = float(value)
        if not math.isfinite(number):
            raise TritonModelException(f"Failed to {verb} metric value: {number} is no number")
        host.connected().tell("metric", self._number, verb, number)


def _created(what: str, verb: str, *fields: Any) -> Any:
    """What the server says of it. Raises TritonModelException: the refusal."""
    try:
        return host.connected().ask(verb, lambda _: list(fields)).result().fields[0]
    except TritonModelException as error:
        raise TritonModelException(f"Error when creating {what}: {error}") from None


class MetricFamily:
    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str | bytes, description: str | bytes, kind: MetricKind) -> None:
        """Raises TritonModelException when the name is in use for another kind of metric. As in Triton, of several
        descriptions of a name the first holds."""
        self._name = text(name, "name")
        self._description = text(description, "description")
        self._kind = of_type(kind, MetricKind, "kind")
        if host.current:  # else the server learns of it with its first metric
            _created("MetricFamily", "metric_family", self._kind.name, self._name, self._description)

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Raises TritonModelException for what the server refuses."""
        if labels is not None and not isinstance(labels, Mapping):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if any(not isinstance(part, str) for label in (labels or {}).items() for part in label):
            raise TritonModelException("Failed to create metric. Names and values of labels must be text.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind is not MetricKind.HISTOGRAM and buckets is not None:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if self._kind is MetricKind.HISTOGRAM and buckets is None:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        return Metric(self._kind, self._name, self._description, dict(labels or {}), _bounds(buckets or ()))


def _bounds(buckets: Sequence[float]) -> list[float]:
    if any(isinstance(bound, str | bytes) or not math.isfinite(bound) for bound in buckets):
        raise TritonModelException("Failed to create metric. Buckets must be finite numbers.")
    return [float(bound) for bound in buckets]
