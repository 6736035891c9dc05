"""The report as Markdown: a table for each group, how it was measured, and what the figures do not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.peers.catalog import PEERS
from benchmarks.peers.notes import at_a_time, first_line, notes
from benchmarks.peers.plan import HISTORY, ORDERED, PICTURE, PROTOCOLS, TURN_TOKENS, TURNS
from benchmarks.peers.results import CaseResult, Cell, GroupResult, PeersReport
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.short_table import INVALID, short_table
from penstock.loadtest.metrics import Figures
from penstock.loadtest.report.formatting import number, plural
from penstock.loadtest.report.markdown import code, escape, table
from penstock.loadtest.search.model import Difference

_HEADINGS = {
    "paced": "Streaming without a model, one event for each token",
    "streaming": "Streaming without a model, as fast as it goes",
    "tensors": "Tensors over KServe v2",
    "generation": "Generation on a CPU",
    "turns": "An agent's turns on a CPU",
    "images": "Images on a CPU",
}
_ABOUT = {
    "paced": "Output tokens per second of CPU of the process that writes them (and its CPU for each token, us). All "
    "send one token of each stream in one event, every 20 ms. The two without a product have their chunks ready and "
    "their engine in the same process; Penstock gets tokens from another process and makes text of them.",
    "streaming": "Output tokens/s, and in brackets thousands of tokens per second of CPU of the process that writes "
    "them. The two without a product have their chunks ready and their engine in the same process; Penstock gets "
    "tokens from another process, makes text of them, and sends those of a stream that have come meanwhile together: "
    "the last column is tokens in an event.",
    "tensors": "Requests/s (p50 / p99 of a request in ms). `add_sub` has two inputs and two outputs of 16 floats, "
    "`identity` one of 3 x 224 x 224 (602 kB). Every server has one instance of a model; Penstock and Triton wait up "
    "to 100 us for a batch.",
    "generation": "Output tokens/s (TTFT / ITL in ms, medians). Greedy, or sampled with temperature 0.7 and top_p "
    "0.9; streamed, without EOS and prefix caching; random weights, in bf16 unless a heading says "
    "otherwise; at most 2,048 tokens in a step.",
    "turns": f"First token of the first turn, with {HISTORY:,} tokens of history, and of turn {TURNS}, in ms. Each "
    f"turn is {TURN_TOKENS} tokens longer than the one before; prompts are kept. Ratios are of the last turn.",
    "images": f"First token for a JPEG of {PICTURE[0]} x {PICTURE[1]} pixels, and for the same request again, in ms. "
    "Ratios are of the first.",
}
_CAVEATS = (
    "Weights are random: lengths of real prompts and answers, EOS and stop strings play no role.",
    "Servers, engines and clients share this machine, without a network between them; what the client takes is "
    "missing to the server. Few cores say little about many, and nothing about GPUs.",
    "Peers run as their documentation suggests, not tuned beyond the flags in this package.",
    "llama.cpp, OpenVINO and others are mostly run with weights of 4 or 8 bits: `--weights int8,int4` measures these.",
    "OpenVINO GenAI runs inside of the program that measures it: no HTTP, no client, and times are those of its steps.",
    "CPU is that of a server's whole process tree. Peers differ in what they do for it: checks, logs, metrics.",
    "Ratios are means over pairs of runs of one round, with their interval at 95 %: of figures that are the same, one "
    "in twenty shows a difference by chance.",
)


def markdown(report: PeersReport) -> str:
    return "\n\n".join(["# Penstock beside its peers", *_head(report), *_tables(report)]) + "\n"


def section(report: PeersReport) -> str:
    """The same within a longer document: without the title, headings one level lower."""
    parts = [*_head(report), *_tables(report)]
    return "\n\n".join(f"#{part}" if part.startswith("##") else part for part in parts)


def _tables(report: PeersReport) -> Iterator[str]:
    if report.interrupted:
        yield "**Ended early by the user**: these are the figures until then."
    about = (
        f"Ratios to the peer, above 1 for the higher rate; of the cases below. {INVALID}: of runs that are not valid."
    )
    yield from ("## In short", about, short_table(report))
    heading = ""
    for group in report.groups:
        load = f"{_ABOUT[group.table]} {_load(group)}"
        if load != heading:
            heading = load
            yield from (f"## {_HEADINGS[group.table]}", load)
        yield f"### {_title(group)}"
        yield from group_parts(group)
    if report.skipped:
        yield "## Left out"
        yield "\n".join(f"- {escape(name)}: {first_line(why)}" for name, why in report.skipped.items())
    yield from ("## Versions", table(("", ""), _versions(report)))
    yield from ("## What these figures do not say", "\n".join(f"- {line}" for line in _CAVEATS))


def _head(report: PeersReport) -> Iterator[str]:
    """The machine, and each command with the time at which it began."""
    about = report.environment
    yield escape(f"{about.get('cpu')}, {about.get('cores')} cores, {about.get('os')}, Python {about.get('python')}.")
    for date, command in sorted({(group.date, group.command) for group in report.groups}):
        yield f"{escape(date)}:"
        yield code(command)


def _load(group: GroupResult) -> str:
    chosen = group.settings
    where = "Servers on the first core, clients on the others" if group.pinned else "All share all cores"
    turns = f"{where}; medians of {plural(chosen.repeat, 'run')} in turns."
    if group.table == "generation":
        requests = ", ".join(
            f"{name} {plural(chosen.waves * shape.waves, 'request')} (at least {shape.least_requests})"
            for name, shape in SHAPES.items()
        )
        tokens = f"Prompts of {chosen.prompt_tokens} tokens, {chosen.output_tokens} out"
        return f"{tokens}; for each place and run of {requests}. {turns}"
    if group.table in ORDERED:
        return f"Answers of {chosen.output_tokens} tokens. {turns}"
    if group.table in _STREAMS:
        return f"Answers of {chosen.output_tokens} tokens, runs of {chosen.seconds:g} s. {turns}"
    return f"Runs of {chosen.seconds:g} s. {turns}"


def _title(group: GroupResult) -> str:
    quantized = "" if group.weights == "native" else f", weights in {group.weights}"
    model = f": {SHAPES[group.model].title}{quantized}" if group.model else ""
    return escape(group.titles[next(iter(group.titles))] + model)


def group_parts(group: GroupResult) -> Iterator[str]:
    """The table and what belongs to it: versions stand elsewhere."""
    peer = next(iter(group.titles))
    taking_part = [name for name in group.titles if name not in group.failures]
    if group.cases:
        rest = [name for name in taking_part if name != peer]
        head = (
            *_CASE_HEAD[group.table],
            *(group.titles[name] for name in taking_part),
            *(f"{group.titles[name]}, ratio" for name in rest),
            f"server CPU for each {'request' if group.table == 'tensors' else 'token'}, us",
            *(["tokens in an event"] if group.table in _STREAMS else []),
        )
        yield table(head, [_row(case, taking_part, rest) for case in group.cases])
        yield _upkeep(group)
    if engines := [f"{group.titles[name]}: {text}" for name, text in group.engines.items() if name in taking_part]:
        yield escape(f"Computed in: {'. '.join(engines)}.")
    if texts := list(notes(group)):
        yield "\n".join(f"- {note}" for note in texts)


def _upkeep(group: GroupResult) -> str:
    """Time to start, and memory after the last case."""
    cells = group.cases[-1].cells
    parts = [
        f"{group.titles[name]} {number(seconds)} s, {number(cells[name].memory_mb)} MB"
        for name, seconds in group.ready_seconds.items()
        if name in cells
    ]
    return escape(f"Start to ready, and memory in the end: {'; '.join(parts)}.")


_CASE_HEAD = {
    "generation": ("at a time",),
    "tensors": ("model", "protocol", "in flight"),
    "paced": ("streams",),
    "streaming": ("streams",),
    "turns": ("at a time",),
    "images": ("at a time",),
}
_STREAMS = ("paced", "streaming")


def _row(result: CaseResult, names: list[str], rest: list[str]) -> tuple[str, ...]:
    case = result.case
    first = (case.model, PROTOCOLS[case.protocol]) if case.table == "tensors" else ()
    ratios = result.ratios()
    return (
        *first,
        at_a_time(case),
        *(_cell(case.table, result.cells[name]) for name in names),
        *(_ratio(ratios.get(name)) for name in rest),
        _cells_of(result, lambda cell: cell.middle("server_cpu_us")),
        *([_cells_of(result, lambda cell: cell.middle("tokens_per_piece"))] if case.table in _STREAMS else []),
    )


def _cells_of(result: CaseResult, figure: Callable[[Cell], float]) -> str:
    """In the order of the columns."""
    return " / ".join(number(figure(cell)) if cell.runs else "–" for cell in result.cells.values())


def _cell(table_: str, cell: Cell) -> str:
    return _figures(table_, cell) + (f" {INVALID}" if cell.invalid else "")


def _figures(table_: str, cell: Cell) -> str:
    figures = cell.figures
    if figures is None:
        return "failed"
    if table_ == "tensors":
        latency = figures.e2e_ms
        return number(figures.requests_per_s) + (f" ({number(latency.p50)} / {number(latency.p99)})" if latency else "")
    front = cell.middle("front_cpu_us")
    if table_ == "paced":
        return f"{number(1e6 / front)} ({number(front)})" if front else "–"
    if table_ in ORDERED:
        return f"{number(cell.middle('first_ms'))} / {number(cell.middle('last_ms'))}"
    if table_ == "streaming":
        return number(figures.output_tokens_per_s) + (f" ({number(1e3 / front)})" if front else "")
    return f"{number(figures.output_tokens_per_s)} ({_middle(figures, 'ttft_ms')} / {_middle(figures, 'itl_ms')})"


def _middle(figures: Figures, field: str) -> str:
    value = getattr(figures, field)
    return "–" if value is None else number(value.p50)


def _ratio(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    if difference.low is None or difference.high is None:
        return f"{difference.ratio:.2f}"
    return f"{difference.ratio:.2f} [{difference.low:.2f}, {difference.high:.2f}]"


def _versions(report: PeersReport) -> Iterator[tuple[str, str]]:
    for name, packages in report.versions.items():
        title = PEERS[name].title if name in PEERS else name
        yield title, ", ".join(f"{package} {version}" for package, version in packages.items())
