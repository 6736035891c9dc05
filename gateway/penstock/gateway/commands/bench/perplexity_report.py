"""The report of `penstock bench perplexity`: the structs are the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.gateway.commands.bench.figures import Machine, aligned, machine_lines


class Text(msgspec.Struct, frozen=True):
    source: str
    sha256: str
    """Of the token ids as 32-bit little-endian numbers: equal texts for equal tokenizers."""
    tokens: int


class Divergence(msgspec.Struct, frozen=True):
    """From the first row's distributions over the next token, in nats."""

    mean: float
    median: float
    p99: float
    most: float
    same_best: float
    """Share of the positions at which the likeliest token is the same."""


class PerplexityRow(msgspec.Struct, frozen=True, kw_only=True):
    settings: str
    """What was compared; empty in the first row."""
    runner: str
    perplexity: float
    error: float
    """Standard error of the perplexity, as if the tokens' losses were independent."""
    seconds: float
    divergence: Divergence | None = None
    """None in the first row, and where the engine does not show whole distributions."""


class PerplexityReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    model: str
    text: Text
    context_length: int
    stride: int
    begins_with: int | None
    """The token at the beginning of each window, if the tokenizer has one."""
    counted: int
    """Tokens whose probabilities are in the perplexity."""
    rows: list[PerplexityRow]
    without_divergence: str = ""
    """Why there is none, where it was asked for."""
    schema: str = "penstock-bench-perplexity/1"


def table(report: PerplexityReport) -> str:
    return "\n".join(_lines(report))


def _lines(report: PerplexityReport) -> Iterable[str]:
    yield from machine_lines(report.machine)
    for row in report.rows:
        yield f"{report.model}: {row.runner}"
    text = report.text
    yield f"{text.source}: the first {text.tokens:,} tokens, SHA-256 of their ids {text.sha256[:16]}"
    begin = "" if report.begins_with is None else f", each begins with token {report.begins_with}"
    cut = f"windows of {report.context_length} tokens, each {report.stride} further{begin}"
    yield f"{cut}; {report.counted:,} tokens count"
    yield ""
    yield from aligned([_HEAD, *map(_cells, report.rows)])
    if report.without_divergence:
        yield ""
        yield f"no KL divergence: {report.without_divergence}"


_HEAD = ("settings", "perplexity", "+-", "KL mean", "KL median", "KL p99", "KL most", "same best", "seconds")


def _cells(row: PerplexityRow) -> Sequence[str]:
    away = row.divergence
    figures = ["-"] * 5
    if away is not None:
        figures = [f"{value:.5f}" for value in (away.mean, away.median, away.p99, away.most)]
        figures.append(f"{away.same_best:.1%}")
    return (
        row.settings or "as given",
        f"{row.perplexity:,.4f}",
        f"{row.error:,.4f}",
        *figures,
        f"{row.seconds:.1f}",
    )
