"""From the stages that a request has entered to spans with a beginning and an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.gateway.front.record import RequestRecord, Stage

_NAMES = {
    Stage.READING: "receive",
    Stage.TEMPLATE: "template",
    Stage.TOKENIZE: "tokenize",
    Stage.UPSTREAM: "upstream",
    Stage.DECODING: "decode",
}


class StageSpan(NamedTuple):
    """Times are of time.monotonic()."""

    name: str
    start: float
    end: float
    children: tuple[StageSpan, ...] = ()
    num_tokens: int | None = None
    """That a model computed in it."""


def stage_spans(record: RequestRecord, ended: float) -> list[StageSpan]:
    """Of a request that ended at `ended`. Empty where the request was only read."""
    entered = _merged(record.stages or [])
    if len(entered) < 2:
        return []
    ends = [start for _, start in entered[1:]] + [ended]
    spans: list[StageSpan] = []
    for (stage, start), end in zip(entered, ends, strict=True):
        if stage is Stage.ENGINE:
            spans += _in_engine(record, start, end)
        elif stage is Stage.MODEL:
            calls = tuple(StageSpan(f"infer {model}", began, done) for model, began, done in record.calls)
            spans.append(StageSpan(f"infer {record.model}", start, end, calls))
        else:
            spans.append(StageSpan(_NAMES[stage], start, end))
    return spans


def _merged(stages: list[tuple[Stage, float]]) -> list[tuple[Stage, float]]:
    """Without repetitions, and without the moment in which KServe hands a request to a model that is a language model
    and has stages of its own."""
    merged: list[tuple[Stage, float]] = []
    for number, (stage, start) in enumerate(stages, 1):
        passing = stage is Stage.MODEL and number < len(stages)
        if not passing and (not merged or merged[-1][0] is not stage):
            merged.append((stage, start))
    return merged


def _in_engine(record: RequestRecord, start: float, end: float) -> Iterator[StageSpan]:
    """The engine tells how long a request was queued together with its first output."""
    if record.first_token_at is None and not record.queue_seconds:
        yield StageSpan("engine", start, end)  # either or both: it ended before
        return
    computed = min(start + record.queue_seconds, end)
    if record.queue_seconds:
        yield StageSpan("queue", start, computed)
    yield StageSpan("prefill", computed, end, _chunks(record))


def _chunks(record: RequestRecord) -> tuple[StageSpan, ...]:
    """Steps overlap where two are under way at a time: one waits for the other on the device."""
    return tuple(StageSpan("prefill step", start, end, (), count) for start, end, count in record.prompt_chunks)
