"""`penstock tune`: from settings to the best command line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from penstock.loadtest.clients.settings import make_client
from penstock.loadtest.errors import LoadTestError, UsageError
from penstock.loadtest.main import CANNOT, STOPPED, ended, status, write_row
from penstock.loadtest.options import Options, converted, options
from penstock.loadtest.search.runs import RealRunner
from penstock.loadtest.search.study import check_output
from penstock.loadtest.search.sweep import one_of_a_row
from penstock.loadtest.tune.findings import TuneReport, tuning_findings
from penstock.loadtest.tune.options import TuneOptions
from penstock.loadtest.tune.params import parse_params
from penstock.loadtest.tune.server import free_ports
from penstock.loadtest.tune.tune import Base, Tuner
from penstock.loadtest.workload import build

_OURS = (sys.executable, "-m", "penstock.gateway.cli")
_GRPC = ("kserve-grpc", "kserve-grpc-stream")


def main(settings: Mapping[str, Any]) -> int:
    """Returns the exit status. Raises LoadTestError when nothing can be measured."""
    load = dict(settings)
    if load.get("label"):
        raise LoadTestError("label: tune labels each server by its options")
    words = load.pop("server", [])
    tune = converted({name: load.pop(name) for name in TuneOptions.__struct_fields__ if name in load}, TuneOptions)
    base, url = plan(words, load.get("url"), str(load.get("protocol", "")), tune)
    chosen = one_of_a_row(options(load | {"url": url}))
    check_output(chosen.output)
    tuner = Tuner(tune, chosen, base, RealRunner())
    make_client(chosen.target)  # what cannot be sent is refused before a server takes its time to start
    build(chosen)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _end)
    try:
        study = write_row(tuner.run(), tuning_findings, chosen.output)
    except KeyboardInterrupt:
        print("penstock tune: ended before anything was measured", file=sys.stderr)
        return STOPPED
    return exit_status(study, chosen)


def exit_status(study: TuneReport, chosen: Options) -> int:
    """1 when nothing keeps the bounds; else as of a load test of the best server."""
    if study.ended_early:
        return ended(study)
    best = None if study.best is None else study.tried[study.best].report
    return CANNOT if best is None else status([best], chosen)


def _end(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C does: what was started is stopped."""
    raise KeyboardInterrupt


def plan(words: Sequence[str], url: str | None, protocol: str, tune: TuneOptions) -> tuple[Base, str]:
    """What to start, and the address to measure. Raises LoadTestError."""
    if not words:
        raise UsageError("which server? Put its command at the end: -- serve MODEL ...")
    ours = words[0] in ("serve", "penstock")
    as_given = ["penstock", *words] if words[0] == "serve" else list(words)
    command = [*_OURS, *as_given[1:]] if ours else as_given
    if url is None and not ours:
        raise UsageError("url: required; only penstock's ports are chosen automatically")
    if any(param.of_model for param in parse_params(tune.param)):
        if not ours:
            raise LoadTestError("param: models of a repository can be tuned with penstock's server only")
        if not any(word.startswith("--model-control-mode") for word in words):
            command += ["--model-control-mode=explicit", "--load-model=*"]
    if url is not None:
        if protocol in _GRPC:
            raise LoadTestError("url: not with gRPC; ports are chosen automatically")
        return Base(command, as_given, url.rstrip("/")), url
    http, grpc, metrics = free_ports(3)
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    base = f"http://127.0.0.1:{http}"
    return Base(command, as_given, base), f"http://127.0.0.1:{grpc}" if protocol in _GRPC else base
