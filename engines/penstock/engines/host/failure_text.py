"""One line for whatever ended a load: what failed, with which settings, and what to try."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.engines.errors import EngineError, PenstockError, from_code

logger = logging.getLogger(__name__)

_MOST_CHARS = 600
"""Of any line; a damaged file can put megabytes of itself into an error."""
_MOST_REASON_CHARS = 240
"""Of an error that has settings and advice behind it: clients of KServe see 512 characters of all that."""
_NOISE = re.compile(
    r"(?:Caught exception: )?(?:Exception from|Check '.*' failed at) \S+:\d+:?"  # OpenVINO's own source
    r"|(?:Exception raised from|frame #\d+|C\+\+ CapturedTraceback|#\d+ ).*"  # torch's
    r"|\[?\s*For further information visit .*"  # pydantic's
    r"|[\s^~|=\-]*"
)
_TRACEBACK = "Traceback (most recent call last)"
_EXTRAS = {
    "torch": "torch",
    "transformers": "torch",
    "vllm": "vllm",
    "tensorrt_llm": "tensorrt-llm",
    "onnxruntime": "onnx",
    "onnx": "onnx",
    "xgboost": "fil",
    "lightgbm": "fil",
    "treelite": "fil",
    "tensorflow": "tensorflow",
    "tensorrt": "tensorrt",
    "nvidia": "dali",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "adlfs": "azure",
    "redis": "redis",
    "opentelemetry": "otel",
    "ray": "ray",
}
"""Which extra of ours brings a package."""
_LESS_MEMORY = "try a smaller --kv-cache-memory or --max-model-len, or --weights int8"
_PLAIN = {"dtype": "f32", "weights": "auto", "activations": "auto", "kv_cache_dtype": "auto"}
"""The values with which a model is most likely to load."""


def is_failure(error: BaseException) -> bool:
    """Whether it is something that went wrong, and not a request to end. Libraries in Rust raise a BaseException where
    they panic (pyo3's PanicException, of which each library has one of its own)."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def one_line(text: str, most: int = _MOST_CHARS) -> str:
    """A text of any length and of many lines, without the lines that name places in a library's own source. Where that
    is too long, its last line; libraries put what has called before what has happened."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if not _NOISE.fullmatch(line)]
    if not lines:
        return ""
    joined = lines[0]
    for line in lines[1:]:
        joined += (" " if joined[-1] in ":;,.(" else "; ") + line
    if len(joined) > most or _TRACEBACK in joined:
        joined = lines[-1]
    if len(joined) > most:
        joined = f"{joined[: most - most // 3]} ... {joined[-(most // 3) :]}"
    return "".join(char if char.isprintable() else "�" for char in joined)


def reason(error: BaseException, most: int = _MOST_CHARS) -> str:
    """Messages of our own errors, of bad settings and of the system suffice; others need their type."""
    text = one_line(str(error), most)
    if text and isinstance(error, PenstockError | ValueError | OSError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def load_failure(error: BaseException, settings: Mapping[str, Any], stage: str = "") -> str:
    """What an operator reads of a load that `error` ended. Our own errors say what to do, and stay as they are.

    `settings` by name, as options of an engine have them; `stage`: what was being done.
    """
    if isinstance(error, PenstockError):
        return one_line(error.message)
    details = [f"{name.replace('_', '-')} {value}" for name, value in settings.items() if value is not None]
    if stage:
        details.append(f"stage {stage}")
    shown = f" ({', '.join(details)})" if details else ""
    return f"{reason(error, _MOST_REASON_CHARS)}{shown}; {_advice(error, settings)}"


def as_load_error(error: BaseException, settings: Mapping[str, Any] | None = None, stage: str = "") -> PenstockError:
    """`error` with the text of `load_failure`; the trace of one that nobody foresaw goes to the log at level debug."""
    text = load_failure(error, settings or {}, stage)
    if not isinstance(error, PenstockError):
        logger.debug("loading failed", exc_info=error)
        return EngineError(text)
    return error if error.message == text else from_code(error.code, text)


@contextmanager
def failures_of(model: str) -> Iterator[None]:
    """Around the load of a model: what ends it is a PenstockError that names the model."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        known = as_load_error(error)
        if f"'{model}'" in known.message:
            raise known from error
        raise from_code(known.code, f"{model}: {known.message}") from error


def _advice(error: BaseException, settings: Mapping[str, Any]) -> str:
    trace = "--log-level debug shows the trace"
    if _is_lack_of_memory(error):
        return f"{_LESS_MEMORY}; {trace}"
    if isinstance(error, ImportError):
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        return trace if extra is None else f"pip install 'penstock-server[{extra}]'; {trace}"
    if isinstance(error, ValueError | OSError):
        return trace
    changes = {name: value for name, value in _PLAIN.items() if settings.get(name) not in (value, None)}
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in changes.items()]
    return f"try {' or '.join(flags)}; {trace}" if flags else trace


def _is_lack_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return re.search(r"bad_alloc|out of memory|[Cc]annot allocate memory|can't allocate memory", str(error)) is not None
