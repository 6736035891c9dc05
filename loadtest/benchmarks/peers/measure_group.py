"""A group of servers, up at the same time and measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from benchmarks.peers.checks import check_tensors
from benchmarks.peers.contenders import CONTENDERS, Contender
from benchmarks.peers.in_process import InProcess
from benchmarks.peers.launch import SEQUENCE, Surroundings, all_cores, genai
from benchmarks.peers.notes import case_name
from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.plan import HISTORY, TURN_TOKENS, TURNS, Case, Group
from benchmarks.peers.process import Process, confined_to, free_ports
from benchmarks.peers.results import MAIN, Cell, GroupResult, PeersReport, Run
from benchmarks.peers.results import CaseResult as Result
from benchmarks.peers.served import Served
from benchmarks.peers.settings import PeersSettings
from benchmarks.peers.usage import memory_bytes
from penstock.loadtest.calibrate import Calibration
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.metrics import Figures
from penstock.loadtest.report.formatting import number, plural

Say = Callable[[str], None]


def room_for(table: str, settings: PeersSettings) -> int:
    """Tokens that a request may have: a power of two."""
    prompt = HISTORY + TURNS * TURN_TOKENS if table == "turns" else settings.prompt_tokens
    return max(SEQUENCE if table == "generation" else 2 * SEQUENCE, 1 << (prompt + settings.output_tokens).bit_length())


_TRIALS, _TRIAL_PROMPT, _TRIAL_TOKENS = 4, 128, 16
"""Requests before the first run of a language model, and tokens of their prompts and answers: they warm up, and are
counted. Long ones would take minutes of the slowest servers."""


class GroupMeasurement:
    """Of one group; `result` has what there is, whenever it ends."""

    def __init__(self, group: Group, peers_folder: PeersFolder, report: PeersReport, say: Say) -> None:
        """The report is only asked what it is of; who measures adds `result` to it."""
        self.result = GroupResult(
            table=group.table,
            model=group.model,
            weights=group.weights,
            titles={name: CONTENDERS[name].title for name in group.contenders},
            pinned=False,
            settings=report.settings,
            date=report.date,
            command=report.command,
        )
        self._group = group
        self._peers_folder = peers_folder
        self._settings = report.settings
        self._say = say
        self._up: dict[str, Served | InProcess] = {}
        self._tried: set[tuple[str, str, str, bool]] = set()
        """Servers whose answers were right: name, model, protocol, sampled."""
        self._slow: dict[str, float] = {}
        """Servers by what a run of theirs took, in seconds."""
        self._calibrations: dict[str, Calibration] = {}

    def run(self) -> None:
        """Raises KeyboardInterrupt; servers have ended then, too."""
        cores = all_cores()
        self.result.pinned = self._group.pinned and len(cores) > 1
        servers, clients = (cores[:1], cores[1:]) if self.result.pinned else (cores, cores)
        self._say(f"{', '.join(self._about)}, {self._group.peer}:")
        with ExitStack() as stack:
            for name in self._group.contenders:
                with self._leaving_out(name):
                    self._start(CONTENDERS[name], servers, stack)
            if self._group.peer not in self._up:
                return  # Penstock by itself is no comparison
            with confined_to(clients):
                for case in self._group.cases:
                    self._measure(case)

    @property
    def _about(self) -> list[str]:
        group = self._group
        return [group.table, *([group.model, group.weights] if group.model else [])]

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """A server that cannot be started."""
        try:
            yield
        except LoadTestError as error:
            self.result.failures[name] = str(error)
            self._say(f"  {name} does not take part: {error}")

    def _start(self, contender: Contender, cores: tuple[int, ...], stack: ExitStack) -> None:
        if contender.lacking:
            raise LoadTestError(
                f"these packages are not installed: {', '.join(contender.lacking)} (penstock-server[onnx])"
            )
        at = Surroundings(
            peers_folder=self._peers_folder,
            model=self._group.model,
            weights=self._group.weights,
            cores=cores,
            places=max(case.concurrency for case in self._group.cases),
            sequence=room_for(self._group.table, self._settings),
            reuse=self._group.table != "generation",
            timeout=self._settings.timeout,
        )
        if contender.engine:
            self.result.engines[contender.name] = contender.computing(self._group.weights).format(
                threads=plural(len(at.cores), "thread"), engine_threads=plural(len(at.engine_cores), "thread")
            )
        log = self._peers_folder.log("-".join((*self._about, contender.name)))
        tokenizer = str(at.folder) if self._group.model else ""
        if contender.start is None:
            process = stack.enter_context(Process(genai(at), log, cores=cores, pipes=True))
            self._up[contender.name] = InProcess(process, tokenizer, at.timeout)
            self.result.ready_seconds[contender.name] = round(process.age, 1)
            return
        ports = free_ports()
        launch = contender.start(at, ports)
        process = stack.enter_context(Process(launch.argv, log, env=launch.env, cores=cores))
        seconds = process.wait_until_ready(f"http://127.0.0.1:{ports.http}{launch.ready}", at.timeout)
        self.result.ready_seconds[contender.name] = round(seconds, 1)
        self._up[contender.name] = Served(process, launch, ports, tokenizer, self._calibrations)

    def _measure(self, case: Case) -> None:
        """Each server `repeat` times; who begins changes from round to round."""
        result = Result(case=case, cells={name: Cell() for name in self._up})
        self.result.cases.append(result)
        for name, cell in result.cells.items():
            with self._noting(name, cell):
                if name in self._slow:
                    raise LoadTestError(f"left out: with fewer at a time a run took {self._slow[name]:.0f} s")
                self._try_out(name, case)
        names = list(self._up)
        for turn in range(self._settings.repeat):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                cell = result.cells[name]
                if not cell.failure and not (cell.runs and name in self._slow):
                    with self._noting(name, cell):
                        cell.runs.append(
                            _checked(self._up[name].measure(case, self._settings, turn), case, self._settings)
                        )
                    self._note_slowness(name, cell, case)
        for name, cell in result.cells.items():
            cell.memory_mb = round(memory_bytes(self._up[name].pid) / 1e6, 1)
        self._say(f"  {describe(result)}")

    def _note_slowness(self, name: str, cell: Cell, case: Case) -> None:
        if cell.runs and case.table == "generation" and cell.runs[-1].figures.duration_s > self._settings.longest:
            self._slow[name] = cell.runs[-1].figures.duration_s

    @contextmanager
    def _noting(self, name: str, cell: Cell) -> Iterator[None]:
        """A failure ends the server's part in this case; the others go on."""
        try:
            yield
        except LoadTestError as error:
            cell.failure = str(error)
            self._say(f"  {name}: {error}")

    def _try_out(self, name: str, case: Case) -> None:
        """Raises LoadTestError for a server whose answers are not what was asked for."""
        server, settings = self._up[name], self._settings
        kind = (name, case.model, case.protocol, case.sampled)
        if kind in self._tried:
            return
        short = msgspec.structs.replace(
            settings,
            prompt_tokens=min(_TRIAL_PROMPT, settings.prompt_tokens),
            output_tokens=min(_TRIAL_TOKENS, settings.output_tokens),
        )
        if isinstance(server, InProcess):
            _same_tokens(server.try_out(case, short, _TRIALS), _TRIALS * short.output_tokens)
        elif case.table == "tensors":
            check_tensors(server.target(case, settings.timeout))
        else:
            report = server.try_out(case, short, _TRIALS)
            _no_errors(report)
            _same_tokens(report.output_tokens, _TRIALS * short.output_tokens)
        self._tried.add(kind)


def _checked(run: Run, case: Case, settings: PeersSettings) -> Run:
    """Raises LoadTestError for a run that is none."""
    figures = run.figures
    _no_errors(figures)
    if case.table != "tensors":
        _same_tokens(figures.output_tokens, figures.completed * settings.output_tokens)
    return run


def _no_errors(figures: Figures) -> None:
    if figures.errors:
        kind, detail = next(iter(figures.error_details.items()))
        raise LoadTestError(f"{figures.failed} requests failed: {kind}: {detail}")


def _same_tokens(counted: int, expected: int) -> None:
    if counted != expected:
        raise LoadTestError(f"{counted} output tokens instead of {expected}")


def describe(result: Result) -> str:
    """One line of progress."""
    case, figure = result.case, MAIN[result.case.table]
    rates = [
        f"{name} {number(statistics.median(values))}"
        for name, cell in result.cells.items()
        if (values := [rate for run in cell.runs if (rate := run.main(case.table)) is not None])
    ]
    name = case_name(case) if case.table == "tensors" else f"{case.model} {case_name(case)}"
    return f"{name}, {figure.title}: {', '.join(rates) or 'none'}"
