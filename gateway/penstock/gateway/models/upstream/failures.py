"""Failures of other servers, as errors of this one: in clear words, and without that server's secrets."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from penstock.engines.errors import ContextLengthError, InvalidRequestError, PayloadTooLargeError, PenstockError
from penstock.gateway.errors import (
    UpstreamError,
    UpstreamRateLimitedError,
    UpstreamTimeoutError,
    UpstreamUnavailableError,
)

RETRYABLE = frozenset({429, 502, 503})
"""Statuses by which a server says that it has not done anything. 504 is not among them: it may have computed."""
_REFUSALS = (400, 413, 422, "400", "413", "422")
"""Codes of errors that come in a stream, with which vLLM refuses a request."""
_MOST_RETRY_AFTER = 3600.0
_MAX_DETAIL = 400
_SHORTEST_SECRET = 6
"""Characters: what is shorter is part of ordinary words."""
_CONTEXT_LENGTH = "context_length_exceeded"


class AttemptFailed(Exception):
    """One server could not answer. `again`: another try may help, as nothing of an answer has come."""

    def __init__(
        self,
        error: PenstockError,
        kind: str,
        *,
        again: bool = True,
        retry_after: float | None = None,
        unhealthy: bool = True,
    ) -> None:
        """`kind` is a label of metrics. `retry_after`: as the server said it, in seconds. `unhealthy`: it counts
        against the server."""
        super().__init__(kind)
        self.error = error
        self.kind = kind
        self.again = again
        self.retry_after = retry_after
        self.unhealthy = unhealthy


class Redactor:
    """Takes what must not be shown out of another server's words."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def failed_answer(model: str, status: int, retry_after: float | None, body: bytes, redact: Redactor) -> AttemptFailed:
    """For an answer with an error's status. `model` is the public name."""
    report = _report(body, redact)
    kind, server = str(status), f"The server behind `{model}`"
    says = f": {report.message}" if report.message else "."
    if status in (400, 413, 422):
        # its own words: what a client knows of OpenAI's errors it finds in them
        message = report.message or f"{server} refused the request with status {status}."
        refusal: type[InvalidRequestError] = PayloadTooLargeError if status == 413 else InvalidRequestError
        refusal = ContextLengthError if report.is_about_length else refusal
        return AttemptFailed(refusal(message, param=report.param), kind, again=False, unhealthy=False)
    error: PenstockError
    match status:
        case 401 | 403:
            error = UpstreamError(f"{server} does not accept this server's key.")
        case 404 | 405:
            error = UpstreamError(f"{server} does not have the model, or not this API.")
        case 408 | 504:
            error = UpstreamTimeoutError(f"{server} ran out of time.")
        case 429:
            error = UpstreamRateLimitedError(f"{server} takes no more requests for now{says}", retry_after=retry_after)
        case 503:
            error = UpstreamUnavailableError(f"{server} cannot take the request now{says}", retry_after=retry_after)
        case _:
            error = UpstreamError(f"{server} failed with status {status}.")
    sheds_load = status == 503 and retry_after is not None  # that is no illness
    return AttemptFailed(
        error,
        kind,
        again=status in RETRYABLE,
        retry_after=retry_after,
        unhealthy=status >= 500 and not sheds_load,
    )


def in_band_error(model: str, error: bytes, redact: Redactor) -> PenstockError:
    """For an error that came as an event of a stream, or with status 200; `error` is the field of this name."""
    report = _report(b'{"error":' + error + b"}", redact)
    if report.is_about_length:
        return ContextLengthError(report.message, param=report.param)
    if report.code in _REFUSALS:
        return InvalidRequestError(
            report.message or f"The server behind `{model}` refused the request.", param=report.param
        )
    says = f": {report.message}" if report.message else "."
    return UpstreamError(f"The server behind `{model}` ended its answer with an error{says}")


def broken_answer(model: str, reason: str) -> UpstreamError:
    return UpstreamError(f"The answer of the server behind `{model}` is broken: {reason}.")


def retry_seconds(value: bytes | None) -> float | None:
    """Of a Retry-After header: seconds or a date, at most an hour; None where it is neither."""
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(0.0, seconds), _MOST_RETRY_AFTER) if math.isfinite(seconds) else None


class _ErrorReport(NamedTuple):
    """What an error's body says."""

    message: str = ""
    """"" for none."""
    code: object = None
    param: str | None = None

    @property
    def is_about_length(self) -> bool:
        return self.code == _CONTEXT_LENGTH or "maximum context length" in self.message


def _report(body: bytes, redact: Redactor) -> _ErrorReport:
    """In the forms of OpenAI, vLLM, Ollama and FastAPI."""
    try:
        content: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return _ErrorReport()
    if isinstance(content, dict) and isinstance(content.get("error"), dict | str):
        content = content["error"]
    fields = {"message": content} if isinstance(content, str) else content
    if not isinstance(fields, dict):
        return _ErrorReport()
    message, param = fields.get("message") or fields.get("detail"), fields.get("param")
    return _ErrorReport(
        " ".join(redact(message).split())[:_MAX_DETAIL] if isinstance(message, str) else "",
        fields.get("code"),
        redact(param)[:_MAX_DETAIL] if isinstance(param, str) and param else None,
    )
