"""Every form of a report that was asked for."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.latency import gaps, latencies
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import Distribution
from penstock.loadtest.options import OutputOptions
from penstock.loadtest.report.file import redacted, rounded, to_json
from penstock.loadtest.report.histogram import histograms
from penstock.loadtest.report.html import page
from penstock.loadtest.report.markdown import markdown
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.other_tools import aiperf_result, vllm_result

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
    measured = latencies(sample, from_intended=open_loop)
    itl = Distribution.of(gaps(sample))
    return [
        sample.index,
        _inert(sample.tag),
        round(sample.intended, 6),
        round(sample.sent, 6),
        _ms(measured.ttft),
        _ms(measured.tpot),
        *((None, None, None) if itl is None else (itl.p50, itl.p99, itl.max)),
        _ms(measured.e2e),
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


def write(report: Report, samples: Sequence[Sample], output: OutputOptions) -> Report:
    """Writes to the files that `output` names; `-` is standard output. `samples` are those of one run, the last.

    Returns the report as written: with histograms, without secrets. Raises LoadTestError for a file that cannot be
    written, after the others.
    """
    open_loop = report.latency_from == "intended"
    if not report.histograms:
        report = replace(report, histograms=histograms(samples, open_loop=open_loop))
    report = redacted(report)
    forms: tuple[tuple[str | None, Callable[[], str]], ...] = (
        (output.json, lambda: to_json(report)),
        (output.markdown, lambda: markdown(report)),
        (output.csv, lambda: to_csv(samples, open_loop=open_loop)),
        (output.html, lambda: page([report])),
        (output.vllm_json, lambda: _json(vllm_result(report, samples))),
        (output.aiperf_json, lambda: _json(aiperf_result(report, samples))),
    )
    problems = [put(path, text()) for path, text in forms if path is not None]
    if any(problems):
        raise LoadTestError("; ".join(filter(None, problems)))
    return report


def check_files(output: OutputOptions) -> None:
    """Raises LoadTestError for files that could not be written after the run, and for two forms in one place."""
    forms = (output.json, output.markdown, output.csv, output.html, output.vllm_json, output.aiperf_json)
    check_places([path for path in forms if path is not None])


def check_places(written: Sequence[str], read: Sequence[str] = ()) -> None:
    """`written`: files, or - for standard output; `read`: files that are needed. Raises LoadTestError where something
    could not be written, or would be written over."""
    needed = {Path(path).resolve() for path in read}
    taken: set[Path] = set()
    for path in written:
        file = Path(path)
        if path != "-" and not (os.access(file, os.W_OK) if file.exists() else _is_writable_folder(file.parent)):
            raise LoadTestError(f"{path}: cannot be written")
        if file.is_dir():
            raise LoadTestError(f"{path}: is a folder")
        if file.resolve() in needed:
            raise LoadTestError(f"{path}: is an input and would be overwritten")
        if file.resolve() in taken and not file.is_char_device():
            raise LoadTestError(f"{path}: only one form of the report can go there")
        taken.add(file.resolve())


def _is_writable_folder(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def put(path: str, text: str) -> str:
    """Says what went wrong, or nothing. A file that is there is replaced."""
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return ""
    try:
        Path(path).write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def _json(tree: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(rounded(tree)), indent=2).decode() + "\n"
