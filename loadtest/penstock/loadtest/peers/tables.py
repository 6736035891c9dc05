"""The report as Markdown: a table for each group, how it was measured, and what the figures do not say."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.loadtest.metrics import Figures
from penstock.loadtest.peers.catalog import PEERS
from penstock.loadtest.peers.results import CaseResult, Cell, GroupResult, PeersReport
from penstock.loadtest.peers.shapes import SHAPES
from penstock.loadtest.report.markdown import code, escape, table
from penstock.loadtest.report.words import number
from penstock.loadtest.search.model import Difference

_HEADINGS = {
    "streaming": "Streaming, without a model",
    "tensors": "Tensors over KServe v2",
    "generation": "Generation on a CPU",
}
_PROTOCOLS = {"kserve-http": "JSON", "kserve-http-binary": "binary", "kserve-grpc": "gRPC"}
_NOTEWORTHY_CORES = 0.1
"""CPU of others, from which on a line says so."""
_ABOUT = {
    "streaming": "Output tokens/s, and in brackets thousands of tokens per second of CPU of the process that writes "
    "them. The two without a product have their chunks ready and their engine in the same process; Penstock gets "
    "tokens from another process and makes text of them.",
    "tensors": "Requests/s (p50 / p99 of a request in ms). `add_sub` has two inputs and two outputs of 16 floats, "
    "`identity` one of 3 x 224 x 224 (602 kB). Every server has one instance of a model; Penstock and Triton wait up "
    "to 100 us for a batch.",
    "generation": "Output tokens/s (TTFT / ITL in ms, medians). Greedy, streamed, without EOS and prefix caching; "
    "random weights in bf16.",
}
_CAVEATS = (
    "Weights are random: lengths of real prompts and answers, EOS and stop strings play no role.",
    "Servers, engines and clients share this machine, without a network between them; what the client takes is "
    "missing to the server. Few cores say little about many, and nothing about GPUs.",
    "Peers run as their documentation suggests, not tuned beyond the flags in this package. vLLM runs eagerly.",
    "OpenVINO GenAI runs inside of the program that measures it: no HTTP, no client, and times are those of its steps.",
    "CPU is that of a server's whole process tree. Peers differ in what they do for it: checks, logs, metrics.",
    "Ratios are means over pairs of runs of one round, with their interval at 95 %: of figures that are the same, one "
    "in twenty shows a difference by chance.",
)


def markdown(report: PeersReport) -> str:
    parts = ["# Penstock beside its peers", _machine(report), "Made with:", code(report.command)]
    if report.interrupted:
        parts.append("**Ended early by the user**: these are the figures until then.")
    heading = ""
    for group in report.groups:
        if group.table != heading:
            heading = group.table
            parts += [f"## {_HEADINGS[heading]}", _ABOUT[heading] + f" {_load(report, group)}"]
        parts += _group(group)
    if report.skipped:
        parts += ["## Left out", *(f"- {escape(name)}: {_first_line(why)}" for name, why in report.skipped.items())]
    parts += ["## Versions", table(("", ""), _versions(report))]
    parts += ["## What these figures do not say", "\n".join(f"- {line}" for line in _CAVEATS)]
    return "\n\n".join(parts) + "\n"


def _machine(report: PeersReport) -> str:
    about = report.environment
    return escape(
        f"{report.date}; {about.get('cpu')}, {about.get('cores')} cores, {about.get('os')}, Python "
        f"{about.get('python')}; medians of {report.settings.repeat} runs in turns."
    )


def _load(report: PeersReport, group: GroupResult) -> str:
    chosen = report.settings
    where = "Servers on the first core, clients on the others." if group.pinned else "All share all cores."
    if group.table == "generation":
        return f"Prompts of {chosen.prompt_tokens} tokens, {chosen.output_tokens} out. {where}"
    if group.table == "streaming":
        return f"Answers of {chosen.output_tokens} tokens, runs of {chosen.seconds:g} s. {where}"
    return f"Runs of {chosen.seconds:g} s. {where}"


def _group(group: GroupResult) -> Iterator[str]:
    peer = next(iter(group.titles))
    model = f": {SHAPES[group.model].title}" if group.model else ""
    yield f"### {escape(group.titles[peer])}{escape(model)}"
    taking_part = [name for name in group.titles if name not in group.failures]
    if group.cases:
        others = [name for name in taking_part if name != peer]
        head = (
            *_CASE_HEAD[group.table],
            *(group.titles[name] for name in taking_part),
            *(f"{group.titles[name]}, ratio" for name in others),
            "server CPU, us each",
        )
        yield table(head, [_row(case, taking_part, others) for case in group.cases])
        yield _upkeep(group)
    if notes := list(_notes(group)):
        yield "\n".join(f"- {note}" for note in notes)


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
    "streaming": ("streams",),
}


def _row(result: CaseResult, names: list[str], others: list[str]) -> tuple[str, ...]:
    case = result.case
    first = (case.model, _PROTOCOLS.get(case.protocol, case.protocol)) if case.table == "tensors" else ()
    ratios = result.ratios()
    return (
        *first,
        str(case.concurrency),
        *(_cell(case.table, result.cells[name]) for name in names),
        *(_ratio(ratios.get(name)) for name in others),
        " / ".join(number(cell.middle("server_cpu_us")) if cell.runs else "–" for cell in result.cells.values()),
    )


def _cell(table_: str, cell: Cell) -> str:
    figures = cell.figures
    if figures is None:
        return "failed"
    if table_ == "tensors":
        latency = figures.e2e_ms
        return number(figures.requests_per_s) + (f" ({number(latency.p50)} / {number(latency.p99)})" if latency else "")
    if table_ == "streaming":
        front = cell.middle("front_cpu_us")
        return number(figures.output_tokens_per_s) + (f" ({number(1e3 / front)})" if front else "")
    return f"{number(figures.output_tokens_per_s)} ({_middle(figures, 'ttft_ms')} / {_middle(figures, 'itl_ms')})"


def _middle(figures: Figures, field: str) -> str:
    found = getattr(figures, field)
    return "–" if found is None else number(found.p50)


def _ratio(found: Difference | None) -> str:
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.ratio:.2f}"
    return f"{found.ratio:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _notes(group: GroupResult) -> Iterator[str]:
    """What a reader of the table must know: failures, doubts, a machine that was not alone."""
    for name, why in group.failures.items():
        yield f"{escape(group.titles[name])} did not take part: {_first_line(why)}"
    for result in group.cases:
        for name, cell in result.cells.items():
            where = f"{escape(group.titles[name])}, {escape(_case_name(result))}"
            if cell.failure:
                yield f"{where}: {_first_line(cell.failure)}"
            doubts = [run for run in cell.runs if run.validity.verdict != "valid"]
            if doubts:
                worst = max(doubts, key=lambda run: run.validity.verdict == "invalid").validity
                runs = f"{len(doubts)} of {len(cell.runs)} runs"
                yield f"{where}: {runs} **{worst.verdict}**: {escape('; '.join(worst.reasons))}"
            elif cell.runs and (foreign := cell.middle("foreign_cores")) > _NOTEWORTHY_CORES:
                yield f"{where}: {number(foreign)} cores were used by others meanwhile"


def _first_line(reason: str) -> str:
    """What follows is of a log on this machine."""
    return escape(reason.partition("\n")[0])


def _case_name(result: CaseResult) -> str:
    case = result.case
    kind = f"{case.model} {_PROTOCOLS[case.protocol]} " if case.table == "tensors" else ""
    return f"{kind}{case.concurrency} at a time"


def _versions(report: PeersReport) -> Iterator[tuple[str, str]]:
    for name, packages in report.versions.items():
        title = PEERS[name].title if name in PEERS else name
        yield title, ", ".join(f"{package} {version}" for package, version in packages.items())
