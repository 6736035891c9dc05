"""Descriptions, in sentences, of what was run and how much it says."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.loadtest.options import Options, is_streamed
from penstock.loadtest.report.figures import load_name
from penstock.loadtest.report.formatting import number, percent, plural
from penstock.loadtest.report.model import Report, ServerWatch

VERDICTS = {
    "valid": "The figures are the server's: nothing was seen that would have blurred them.",
    "doubtful": "Read the figures with the reasons below in mind.",
    "invalid": "Do not use these figures: they are not the server's.",
}


def title(report: Report) -> str:
    return report.label or report.options.target.model or report.options.target.url


def what_was_run(report: Report) -> list[tuple[str, str]]:
    """Pairs of a name and a value, the most telling first."""
    options = report.options
    target = options.target
    pairs = [
        ("Server", target.url),
        ("Model", target.model or "the server's only one"),
        ("Protocol", target.protocol + (", streamed" if is_streamed(target) else ", not streamed")),
        ("Requests", _workload(report)),
        ("Load", f"{'open' if options.open_loop else 'closed'} loop, {load_name(options)}"),
        ("Latencies from", _start(report.latency_from)),
        ("Date", report.date),
        ("Duration", f"{number(report.duration_s)} s" + (f", {len(report.runs)} runs" if len(report.runs) > 1 else "")),
    ]
    if report.interrupted_by_user:
        pairs.append(("Ended early", "by the user; these are the figures until then"))
    return pairs


def outcome(report: Report) -> str:
    """What became of the requests."""
    several = len(report.runs) > 1
    parts = [
        f"{report.completed:,} completed" + (" (median of the runs)" if several else ""),
        f"{report.failed:,} failed" + (" (in all runs)" if several else ""),
    ]
    if report.interrupted:
        parts.append(f"{report.interrupted:,} cut off at the end and left out")
    return f"{', '.join(parts)}; {report.prompt_tokens:,} prompt tokens, {report.output_tokens:,} output tokens"


def _start(latency_from: str) -> str:
    if latency_from == "intended":
        return "the moment at which a request was due (no coordinated omission)"
    return "the moment at which a request was sent"


def _workload(report: Report) -> str:
    work = report.options.workload
    counted = f" ({number(mean)} as counted, mean)" if (mean := report.tokens.get("prompt_counted")) else ""
    if work.trace is not None:
        return f"as recorded in {work.trace}"
    if work.dataset is not None:
        return f"from {work.dataset}"
    if work.mix:
        return f"a mix of {plural(len(work.mix), 'part')}"
    shared = f" after {work.shared_prefix_tokens} shared ones" if work.shared_prefix_tokens else ""
    text = f"{work.prompt_tokens} prompt tokens{shared}{counted}, {work.output_tokens} output tokens"
    return text + (f", {work.turns} turns" if work.turns > 1 else "")


def settings(options: Options) -> list[tuple[str, str, bool]]:
    """Every setting as its flag, its value, and whether it was chosen, not the default."""
    rows = []
    for section in msgspec.structs.fields(options):
        values = getattr(options, section.name)
        for setting in msgspec.structs.fields(values):
            value = getattr(values, setting.name)
            flag = f"--{setting.name.replace('_', '-')}"
            rows.append((flag, _shown(value), setting.required or value != setting.default))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "; ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Leaves of nested dicts by their path, as text."""
    leaves: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            leaves.append((prefix + name, ", ".join(map(str, value))))
        else:
            leaves.append((prefix + name, _shown(value)))
    return leaves


def server_metrics(report: Report) -> list[tuple[str, str, str, str]]:
    """Name, least, mean and most of each gauge of the server and the GPUs during the run."""
    watch = report.server
    if watch is None:
        return []
    series = {**watch.metrics, **watch.gpu}
    return [
        (name, number(min(values)), number(sum(values) / len(values)), number(max(values)))
        for name, values in series.items()
        if values
    ]


def server_seen(watch: ServerWatch) -> str:
    """How the server was watched, in sentences; empty where it was not."""
    said = [f"Read {len(watch.seconds)} times from {watch.metrics_url}."] if watch.metrics_url else []
    if watch.cores is not None:
        said.append(f"Its processes used {number(watch.cores)} cores.")
    return " ".join(said)


def server_counters(report: Report) -> list[tuple[str, str]]:
    """By how much each of the server's counters has grown."""
    grown = report.server.counters if report.server else {}
    return [(name, number(int(amount) if amount == int(amount) else amount)) for name, amount in grown.items()]


def measuring(report: Report) -> list[tuple[str, str]]:
    """What the verdict rests on."""
    validity = report.validity
    pairs = [
        ("Client CPU", f"{number(validity.client_cores)} cores, busiest process {validity.busiest_client:.0%} of one"),
        ("Client processes", number(validity.processes)),
        ("Time of day against the clock", f"{number(validity.clock_ms)} ms"),
        ("Pieces per read", number(validity.pieces_per_read)),
    ]
    if validity.lag_ms is not None:
        pairs.append(("Clients' event loop late", _lateness(validity.lag_ms.p50, validity.lag_ms.p99)))
    if validity.send_lag_ms is not None:
        pairs.append(("Requests sent late", _lateness(validity.send_lag_ms.p50, validity.send_lag_ms.p99)))
    for name, value in validity.floor_ms.items():
        pairs.append((f"Floor of this client, {name.upper()}", f"{number(value)} ms ({validity.floor_protocol})"))
    if validity.ceiling_tokens_per_s:
        share = percent(validity.ceiling_share)
        pairs.append(("Ceiling", f"{number(validity.ceiling_tokens_per_s)} tokens/s a process; {share} of it used"))
    if validity.lost_processes:
        pairs.append(("Client processes that died", number(validity.lost_processes)))
    return pairs


def _lateness(p50: float, p99: float) -> str:
    return f"p50 {number(p50)} ms, p99 {number(p99)} ms"
