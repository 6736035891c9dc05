"""`python loadtest/benchmarks peers`: sets up, measures, writes."""

from __future__ import annotations

import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

from benchmarks import COMMAND
from benchmarks.peers.catalog import LLAMA_CPP, PEERS, Peer
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.earlier_report import check_comparable, keep_earlier, read_report
from benchmarks.peers.install import install, is_installed
from benchmarks.peers.measure_group import GroupMeasurement
from benchmarks.peers.models import make_model
from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.plan import Group, plan
from benchmarks.peers.recipes import convert
from benchmarks.peers.repositories import make_repositories
from benchmarks.peers.results import PeersReport, to_json
from benchmarks.peers.settings import PeersSettings, settings
from benchmarks.peers.shell import SetupError
from benchmarks.peers.tables import markdown
from benchmarks.peers.update import check, update
from penstock.loadtest.environment import environment
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import OutputOptions
from penstock.loadtest.report.write import check_files, put

_OWN = ("penstock-server", "openvino", "onnxruntime", "httptools", "uvloop", "grpcio")
"""What Penstock's own figures depend on."""
INTERRUPTED = 130
"""Exit status, as of a shell."""


def main(flags: Mapping[str, Any], argv: Sequence[str] = ()) -> int:
    """Returns the exit status: 1 when a group was left in the middle. Raises LoadTestError when nothing can be
    measured."""
    if not sys.platform.startswith("linux"):
        raise LoadTestError("peers: they are started, pinned and watched with what only Linux has")
    chosen = settings(flags)
    check_files(OutputOptions(json=chosen.json, markdown=chosen.markdown))
    for document in chosen.update:
        check(document)
    earlier = read_report(chosen.json) if chosen.keep and chosen.json else None
    report = measure(chosen, argv, earlier)
    if chosen.run:
        if earlier is not None:
            keep_earlier(report, earlier)
        _write(report)
    return INTERRUPTED if report.interrupted else int(any(group.fault for group in report.groups))


def measure(chosen: PeersSettings, argv: Sequence[str] = (), earlier: PeersReport | None = None) -> PeersReport:
    """What there is when it ends, or is ended. Raises LoadTestError as `main`."""
    peers_folder = PeersFolder(Path(chosen.dir).expanduser())
    report = PeersReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join([*COMMAND, *(argv or sys.argv[1:])]),
        settings=chosen,
        environment=environment(),
        versions={},
    )
    with peers_folder.claimed(), _terminated_like_interrupted():
        try:
            _measure(report, peers_folder, earlier)
        except KeyboardInterrupt:
            report.interrupted = True
            _say("ended early: all servers have ended, what was measured is written")
    return report


def _measure(report: PeersReport, peers_folder: PeersFolder, earlier: PeersReport | None) -> None:
    chosen = report.settings
    groups = plan(chosen)
    report.skipped = _set_up(peers_folder, chosen, groups)
    ready = [group for group in groups if group.peer not in report.skipped]
    if not ready:
        raise LoadTestError(f"nothing to measure: {_reasons(report.skipped) or 'no peer has such a table'}")
    report.versions = _versions(peers_folder, ready)
    if not chosen.run:
        return
    if earlier is not None:
        check_comparable(report, earlier)
    began = monotonic()
    for number, group in enumerate(ready, 1):
        _say(f"group {number} of {len(ready)}, after {(monotonic() - began) / 60:.0f} min")
        measurement = GroupMeasurement(group, peers_folder, report, _say)
        report.groups.append(measurement.result)
        try:
            measurement.run()
        except Exception as error:  # what went wrong in one group does not cost the figures of the others
            traceback.print_exc()
            measurement.result.fault = f"{type(error).__name__}: {error}"


def _set_up(peers_folder: PeersFolder, chosen: PeersSettings, groups: Sequence[Group]) -> dict[str, str]:
    """Peers that are not there, and why. Without `--setup` nothing is installed or converted."""
    skipped: dict[str, str] = {}
    models = sorted({group.model for group in groups if group.model})
    if models:
        _say(f"models: {', '.join(models)}")
        for model in models:
            make_model(peers_folder, model)
    if any(group.table == "tensors" for group in groups):
        make_repositories(peers_folder, onnx=not CONTENDERS["penstock-onnx"].lacking)
    for name in _peers_of(groups):
        forms = {(group.model, group.weights) for group in groups if name in group.peers and group.model}
        try:
            _prepare(peers_folder, PEERS[name], sorted(forms), chosen)
        except SetupError as error:
            skipped[name] = str(error)
            _say(f"{name} is left out: {error}")
    return skipped


def _peers_of(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group.peers))


def _prepare(peers_folder: PeersFolder, peer: Peer, forms: Sequence[tuple[str, str]], chosen: PeersSettings) -> None:
    if not is_installed(peers_folder, peer):
        if not chosen.setup:
            raise SetupError("it is not set up (--setup)")
        if peer.on_request and peer.name not in chosen.only:
            raise SetupError(f"it is set up on request only (--setup --only {peer.name})")
        _say(f"{peer.name}: installing")
        install(peers_folder, peer)
    for model, weights in forms:
        convert(peers_folder, peer.name, model, weights)


def _versions(peers_folder: PeersFolder, groups: Sequence[Group]) -> dict[str, dict[str, str]]:
    """Of what stands in the tables; llama.cpp is known by the distribution that its source is from."""
    own = {package.metadata["Name"].lower(): package.version for package in distributions()}
    versions = {"penstock": {package: own[package] for package in _OWN if package in own}}
    for name in _peers_of(groups):
        peer = PEERS[name]
        installed = dict([LLAMA_CPP.split("==")]) | peers_folder.versions(name)
        versions[name] = {package: installed[package] for package in peer.packages if package in installed}
    return versions


def _write(report: PeersReport) -> None:
    """Raises LoadTestError for a file that cannot be written, after the others."""
    chosen = report.settings
    problems = [put(chosen.json, to_json(report).decode())] if chosen.json else []
    problems += [update(document, report) for document in chosen.update]
    if chosen.markdown or not (chosen.json == "-" or chosen.update):
        problems.append(put(chosen.markdown or "-", markdown(report)))
    if any(problems):
        raise LoadTestError("; ".join(filter(None, problems)))


def _reasons(skipped: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in skipped.items())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends servers, too, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
