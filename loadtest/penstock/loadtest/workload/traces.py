"""Replaying a trace."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Call, Session
from penstock.loadtest.options import WorkloadOptions
from penstock.loadtest.workload.contents import TENSORS, Contents

# Recorded traffic: when requests came and how long they and their answers were. Files are read as they are replayed.
#
# - Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces): JSON lines with timestamp in ms, input_length,
# output_length, and hash_ids: one for each block of 512 input tokens, equal where the input is equal up to there. -
# BurstGPT (github.com/HPMLL/BurstGPT): CSV with Timestamp in seconds, Request tokens and Response tokens; version 2
# has Session ID and Elapsed time, too. Failed requests have 0 response tokens. - Azure LLM inference traces 2023 and
# 2024 (github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

Count = Annotated[int, Meta(ge=0)]


class Row(msgspec.Struct, frozen=True):
    place: str
    seconds: float
    """Since any time."""
    prompt_tokens: int
    output_tokens: int
    blocks: list[int] = []


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: list[int] = []


_decode = msgspec.json.Decoder(_MooncakeLine).decode
_COLUMNS = {
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}


def read_trace(path: str, trace_format: str) -> Iterator[Row]:
    """All rows in their order. Raises LoadTestError for what is not of the format, with the line."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as lines:
            first = lines.readline()
            if trace_format == "auto":
                trace_format = _format_of(path, first)
            lines.seek(0)
            yield from _mooncake(path, lines) if trace_format == "mooncake" else _table(path, lines, trace_format)
    except OSError as error:
        raise LoadTestError(f"trace: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LoadTestError(f"trace: {path}: not UTF-8: {error.reason}") from None


def _format_of(path: str, line: str) -> str:
    if line.lstrip().startswith("{"):
        return "mooncake"
    fields = {field.strip() for field in line.split(",")}
    for name, columns in _COLUMNS.items():
        if fields.issuperset(columns):
            return name
    raise LoadTestError(f"trace: {path}: its first line is of no known format: {line.strip()[:200]!r}")


def _mooncake(path: str, lines: Iterable[str]) -> Iterator[Row]:
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = _decode(text)
        except msgspec.MsgspecError as error:
            raise LoadTestError(f"trace: {path}, line {number}: {error}") from None
        seconds = line.timestamp / 1e3
        yield Row(f"{path}, line {number}", seconds, line.input_length, line.output_length, line.hash_ids)


def _table(path: str, lines: Iterable[str], trace_format: str) -> Iterator[Row]:
    table = csv.reader(lines)
    header = [field.strip() for field in next(table, [])]
    columns = _COLUMNS[trace_format]
    if missing := [name for name in columns if name not in header]:
        raise LoadTestError(f"trace: {path}: a {trace_format} trace has a column {missing[0]!r}, this one has {header}")
    if "NumImages" in header:
        raise LoadTestError(f"trace: {path}: its requests have images, which are not sent")
    when, prompt, answered = map(header.index, columns)
    seconds: Callable[[str], float] = float if trace_format == "burstgpt" else _seconds
    for fields in table:
        if not fields:
            continue
        place = f"{path}, line {table.line_num}"
        try:
            row = Row(place, seconds(fields[when]), int(fields[prompt]), int(fields[answered]))
        except (ValueError, IndexError):
            raise LoadTestError(f"trace: {place}: not a row of a {trace_format} trace: {','.join(fields)!r}") from None
        yield row


def _seconds(text: str) -> float:
    """Of `2023-11-16 18:17:03.9799600` and `2024-05-10 00:00:00.009930+00:00`; those without a zone are of one zone."""
    time = datetime.fromisoformat(text.strip())
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


class Trace:
    """The sessions of every `parts`-th request of a trace."""

    def __init__(self, options: WorkloadOptions, contents: Contents) -> None:
        self.skipped = 0
        """Requests without prompt or output tokens so far, which is how traces record failures."""
        self._options = options
        self._contents = contents

    def sessions(self, part: int, parts: int) -> Iterator[Session]:
        """At the recorded times, counted from the first request that is sent. Raises LoadTestError for bad rows."""
        begin: float | None = None
        last = 0.0
        for index, row in enumerate(self._rows()):
            if index == self._options.requests:
                return
            if begin is None:
                begin = last = row.seconds
            if row.seconds < last:
                raise LoadTestError(f"trace: {row.place}: earlier than the request before it")
            last = row.seconds
            if index % parts == part:
                at = (row.seconds - begin) / self._options.trace_speed
                yield Session(calls=[self._call(index, row)], at=at)
        if begin is None:
            raise LoadTestError(f"trace: {self._options.trace} has no requests")

    def _rows(self) -> Iterator[Row]:
        for row in read_trace(self._options.trace or "", self._options.trace_format):
            if row.prompt_tokens > 0 and row.output_tokens > 0:
                yield row
            else:
                self.skipped += 1

    def _call(self, index: int, row: Row) -> Call:
        contents, size = self._contents, self._options.trace_block
        blocks = row.blocks
        if len(blocks) > -(-row.prompt_tokens // size):
            raise LoadTestError(
                f"trace: {row.place}: {len(blocks)} hash_ids are too many for {row.prompt_tokens} tokens"
                f" in blocks of {size}: see --trace-block"
            )
        if contents.protocol in TENSORS:
            return Call(index=index, prompt="", output_tokens=0)
        tokens = contents.own_tokens(row.prompt_tokens)
        whole = min(len(blocks), (tokens - 1) // size)
        lead = [contents.block(block, size) for block in blocks[:whole]]
        # the rest is the beginning of one more block, or nobody else's
        if whole < len(blocks):
            rng, number = contents.rng("block", blocks[whole]), None
        else:
            rng, number = contents.rng("session", index), index
        return Call(
            index=index,
            prompt=contents.source.prompt(lead, whole * size, tokens - whole * size, rng, number),
            prompt_tokens=contents.known_tokens(tokens),
            asked_prompt_tokens=contents.asked_tokens(row.prompt_tokens),
            output_tokens=contents.output_tokens(row.output_tokens),
        )
