"""The report of `penstock bench engine`: the structs are the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.engines.contract.model_info import ModelWork
from penstock.gateway.commands.bench.figures import Machine, Spread, aligned, machine_lines
from penstock.gateway.commands.bench.loading import LoadTimes


class PromptRow(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that is computed alone, up to its first token."""

    tokens: int
    seconds: Spread
    tokens_per_second: Spread
    flops: float | None = None
    """Of the whole prompt; None: the engine does not count them."""
    share_of_flops: float | None = None
    """The FLOPs in a second, by the most that large products reached; None: this was not measured, or is a GPU."""


class DecodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in which each request gets one token."""

    batch_size: int
    context_length: int
    """Of each request at the beginning."""
    step_ms: Spread
    tokens_per_second: Spread
    """Of all requests together."""
    bytes: float | None = None
    """Weights, keys and values that a step reads, on average; None as in `PromptRow`."""
    flops: float | None = None
    read_speed: Spread | None = None
    """Bytes per second that as many threads read of as many bytes, measured right after the steps."""
    share_of_read_speed: float | None = None
    """By the most that was reached: what else runs on the machine only slows it down."""
    share_of_flops: float | None = None


class ProductSpeed(msgspec.Struct, frozen=True):
    threads: int
    flops_per_second: Spread


class Pages(msgspec.Struct, frozen=True):
    """Resident bytes of this process, as /proc/self/status has them."""

    anonymous: int
    file: int


class MemoryFigures(msgspec.Struct, frozen=True):
    before: Pages
    loaded: Pages
    measured: Pages
    """After everything, with the blocks of the KV cache that were in use."""
    peak_while_loading: int
    """Of both kinds together."""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    model: str
    runner: str
    chunk: int
    """Most tokens of a prompt in one step."""
    decode_steps: int
    repeats: int
    load: LoadTimes
    memory: MemoryFigures
    work: ModelWork | None
    products: list[ProductSpeed]
    prompts: list[PromptRow]
    decode: list[DecodeRow]
    left_out: list[str]
    schema: str = "penstock-bench-engine/1"
    """As `penstock plan --measured` reads it."""


def table(report: EngineReport) -> str:
    return "\n".join(_lines(report))


def _lines(report: EngineReport) -> Iterable[str]:
    yield from machine_lines(report.machine)
    yield f"{report.model}: {report.runner}"
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in report.load.stages.items())
    yield f"loaded in {report.load.seconds:.2f} s" + (f" ({stages})" if stages else "")
    memory = report.memory
    for when, pages in (("before", memory.before), ("loaded", memory.loaded), ("in the end", memory.measured)):
        yield f"memory {when}: {pages.anonymous / 1e6:,.0f} MB anonymous, {pages.file / 1e6:,.0f} MB of files"
    yield f"memory at most while it was loaded: {memory.peak_while_loading / 1e6:,.0f} MB"
    if report.work is None:
        yield "shares: none, what a step of this model reads and computes is not counted"
    else:
        work = report.work
        yield (
            f"each step reads {work.weight_bytes / 1e6:,.1f} MB of weights and {sum(work.kv_bytes) / 1e3:,.1f} kB for "
            f"each token attended to; a token takes {work.token_flops / 1e6:,.1f} MFLOP, its logits "
            f"{work.logits_flops / 1e6:,.1f}"
        )
    for product in report.products:
        speed = product.flops_per_second
        yield f"large products in the same types, threads {product.threads}: {_spread(speed, 1e9, 0)} GFLOP/s"
    yield f"medians of {report.repeats} [least, most]; shares are the median's, of the most that the machine reached"
    yield ""
    yield from aligned([_PROMPT_HEAD, *map(_prompt_cells, report.prompts)])
    yield ""
    yield from aligned([_DECODE_HEAD, *map(_decode_cells, report.decode)])
    if report.left_out:
        yield ""
        yield from (f"left out: {reason}" for reason in report.left_out)


_PROMPT_HEAD = ("prompt", "ms", "tokens/s", "GFLOP", "of FLOP/s")
_DECODE_HEAD = (
    *("batch", "context", "ms/step", "tokens/s", "MB read", "GB/s", "machine's GB/s", "of it", "of FLOP/s"),
)


def _prompt_cells(row: PromptRow) -> Sequence[str]:
    return (
        str(row.tokens),
        _spread(row.seconds, 1e-3, 1),
        f"{row.tokens_per_second.median:,.0f}",
        "-" if row.flops is None else f"{row.flops / 1e9:,.1f}",
        _percent(row.share_of_flops),
    )


def _decode_cells(row: DecodeRow) -> Sequence[str]:
    seconds = row.step_ms.median / 1e3
    return (
        str(row.batch_size),
        str(row.context_length),
        _spread(row.step_ms, 1, 2),
        f"{row.tokens_per_second.median:,.0f}",
        "-" if row.bytes is None else f"{row.bytes / 1e6:,.1f}",
        "-" if row.bytes is None or not seconds else f"{row.bytes / seconds / 1e9:,.1f}",
        "-" if row.read_speed is None else _spread(row.read_speed, 1e9, 1),
        _percent(row.share_of_read_speed),
        _percent(row.share_of_flops),
    )


def _spread(spread: Spread, unit: float, digits: int) -> str:
    middle, least, most = (f"{value / unit:,.{digits}f}" for value in (spread.median, spread.least, spread.most))
    return f"{middle} [{least}, {most}]"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
