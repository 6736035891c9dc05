"""One line for each request that has ended. Never prompts, and nothing of the client's that could fake a line."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

from penstock.engines.host.terminal import line_end
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import QUIET_ROUTES, Outcome, RequestRecord

Form = Literal["text", "json"]

_FLUSH_SECONDS = 0.2
_MOST_LINES = 1 << 16
"""That wait while earlier ones are being written. With more, requests wait for the reader of the log."""

_OK = Outcome.OK
_encode = msgspec.json.Encoder().encode


class AccessLog:
    """Lines are written together, a few times a second: a write for each would cost more than the line. A thread writes
    them: what reads the log may be slow, and all requests would wait for it.

    `sample` is the share of good requests that are told, `slow_s` how long one must take to be told. What was not
    answered well is told always.
    """

    def __init__(
        self,
        stream: TextIO,
        form: Form = "text",
        *,
        sample: float = 1.0,
        slow_s: float = 0.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._stream = stream
        self._line_end = line_end(stream)
        self._line: Callable[[RequestContext, float], str] = _Text() if form == "text" else _json
        self._sample = sample
        self._slow_s = slow_s
        self._chance = chance
        self._lines: list[str] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-access-log")
        self._writing: Future[None] | None = None

    def __call__(self, context: RequestContext) -> None:
        record = context.record
        total = time.monotonic() - context.arrival
        if record.outcome is _OK and not self._is_sampled(record, total):
            return
        if not self._lines:
            asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._write_behind)
        self._lines.append(self._line(context, total) + self._line_end)

    def _is_sampled(self, record: RequestRecord, total: float) -> bool:
        if record.route in QUIET_ROUTES or total < self._slow_s:
            return False
        return self._sample >= 1 or self._chance() < self._sample

    def _write_behind(self) -> None:
        if self._writing is not None and not self._writing.done():
            if len(self._lines) < _MOST_LINES:
                asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._write_behind)
                return
            self._writing.result()
        lines, self._lines = self._lines, []
        self._writing = self._thread.submit(self._write, lines)

    def flush(self) -> None:
        """Returns when everything is written. At the end of the server."""
        if self._writing is not None:
            self._writing.result()
        lines, self._lines = self._lines, []
        self._write(lines)

    def _write(self, lines: list[str]) -> None:
        if lines:
            with suppress(OSError):  # nobody reads the log any more
                self._stream.write("".join(lines))
                self._stream.flush()


class _Text:
    """As other log lines look. The second is written out once: that costs more than the rest of a line."""

    def __init__(self) -> None:
        self._second = 0
        self._written = ""

    def __call__(self, context: RequestContext, total: float) -> str:
        record, usage = context.record, context.record.usage
        line = f"{self._now()} ACCESS  {record.method or 'RPC'} {record.route} {record.status or '-'} {record.outcome}"
        if record.reason:
            line += f" {record.reason}"
        if record.model:
            line += f" model={record.model}"
        if record.target:
            line += f" target={record.target}"
        if context.tenant:
            line += f" tenant={context.tenant}"
        if usage is not None:
            line += (
                f" tokens={usage.prompt_tokens}+{usage.completion_tokens} cached={usage.cached_tokens}"
                f" queue={record.queue_seconds:.3f}s"
            )
            if record.first_token_at is not None:
                line += f" ttft={record.first_token_at - context.arrival:.3f}s"
        if record.http_version:
            line += f" http={record.http_version}"
        return f"{line} total={total:.3f}s in={record.bytes_in} out={record.bytes_out} id={context.id}"

    def _now(self) -> str:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._written = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._written},{int((now - second) * 1000):03d}"


def _json(context: RequestContext, total: float) -> str:
    record, usage = context.record, context.record.usage
    fields: dict[str, object] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": context.id,
        "protocol": record.protocol,
        "http_version": record.http_version or None,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "outcome": record.outcome.value,
        "reason": record.reason,
        "tenant": context.tenant,
        "model": record.model,
        "total_s": round(total, 4),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    if record.ignored:
        fields["ignored"] = record.ignored
    if record.target:
        fields["target"] = record.target
    if usage is not None:
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["completion_tokens"] = usage.completion_tokens
        fields["cached_tokens"] = usage.cached_tokens
        fields["queue_s"] = round(record.queue_seconds, 4)
        fields["ttft_s"] = None if record.first_token_at is None else round(record.first_token_at - context.arrival, 4)
    return _encode(fields).decode()
