"""One line for each request, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from penstock.loadtest.latency import gaps, latencies
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import Distribution

COLUMNS = (
    "index",
    "tag",
    "intended_s",
    "sent_s",
    "ttft_ms",
    "tpot_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "e2e_ms",
    "prompt_tokens",
    "output_tokens",
    "finish_reason",
    "error",
)


def to_csv(samples: Sequence[Sample], *, open_loop: bool) -> str:
    """In the order of their indices, failed and interrupted ones included; empty cells for what there is not.
    Latencies count from where the report's do. A failed request keeps what it had measured."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for sample in sorted(samples, key=lambda sample: sample.index):
        writer.writerow(_row(sample, open_loop))
    return text.getvalue()


def _row(sample: Sample, open_loop: bool) -> list[str | int | float | None]:
    found = latencies(sample, from_intended=open_loop)
    itl = Distribution.of(gaps(sample))
    return [
        sample.index,
        _inert(sample.tag),
        round(sample.intended, 6),
        round(sample.sent, 6),
        _ms(found.ttft),
        _ms(found.tpot),
        *((None, None, None) if itl is None else (itl.p50, itl.p99, itl.max)),
        _ms(found.e2e),
        sample.prompt_tokens if sample.prompt_tokens is not None else sample.wanted_prompt_tokens,
        sample.tokens,
        _inert(sample.finish_reason or ""),
        sample.error,
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _inert(text: str) -> str:
    """Spreadsheets run cells that begin like a formula; servers choose finish reasons."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
