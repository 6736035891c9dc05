"""A server that is ready, and one run of the load test against it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.peers.launch import Launch
from benchmarks.peers.plan import TENSORS, Case, requests_of
from benchmarks.peers.process import Ports, Process
from benchmarks.peers.results import Run
from benchmarks.peers.settings import PeersSettings
from benchmarks.peers.usage import Meter, Used
from penstock.loadtest.calibrate import Calibration
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import LoadOptions, Options, Target, WorkloadOptions
from penstock.loadtest.report.model import Report
from penstock.loadtest.run import LoadTest


class Quiet:
    """Nobody looks on: lines on a terminal cost the machine that is measured."""

    def update(self, samples: Sequence[Sample], in_flight: int) -> None:
        return None

    def note(self, text: str) -> None:
        return None


class Served:
    def __init__(
        self, process: Process, launch: Launch, ports: Ports, tokenizer: str, calibrations: dict[str, Calibration]
    ) -> None:
        """`calibrations`: what the client costs by itself, by protocol; filled by the first server that speaks it."""
        self.process = process
        self._calibrations = calibrations
        self.launch = launch
        self.ports = ports
        self._tokenizer = tokenizer

    @property
    def pid(self) -> int:
        return self.process.pid

    def measure(self, case: Case, settings: PeersSettings, seed: int) -> Run:
        """Raises LoadTestError when nothing can be measured, KeyboardInterrupt when the user ended it."""
        meter = Meter(self.pid)
        report = self._report(options_of(self, case, settings, seed=seed))
        return run_of(case, report, meter.read())

    def try_out(self, case: Case, settings: PeersSettings, requests: int) -> Report:
        """Requests that do not count, all at once."""
        case = msgspec.structs.replace(case, concurrency=requests)
        return self._report(options_of(self, case, settings, seed=-1, requests=requests))

    def _report(self, options: Options) -> Report:
        protocol = options.target.protocol
        test = LoadTest(options, Quiet(), calibration=self._calibrations.get(protocol))
        report = test.run_here()
        if test.interrupted:
            raise KeyboardInterrupt
        if test.calibration is not None:
            self._calibrations[protocol] = test.calibration
        return report

    def target(self, case: Case, timeout: float) -> Target:
        http = f"http://127.0.0.1:{self.ports.http}"
        if case.table == "tensors":
            url = f"http://127.0.0.1:{self.ports.grpc}" if case.protocol == "kserve-grpc" else http
            return Target(
                url=url,
                model=case.model,
                protocol=case.protocol,
                input_tensor=TENSORS[case.model],
                request_timeout=timeout,
            )
        return Target(
            url=http,
            model=self.launch.model,
            protocol=case.protocol,
            extra=self.launch.sampled_extra if case.sampled else self.launch.extra,
            ignore_eos=self.launch.ignore_eos,
            end_mark=self.launch.end_mark,
            request_timeout=timeout,
        )

    @property
    def tokenizer(self) -> str | None:
        return self._tokenizer or None


def options_of(
    served: Served, case: Case, settings: PeersSettings, *, seed: int, requests: int | None = None
) -> Options:
    """The load of one run: so many requests for each place (generation), or so many seconds."""
    timed = case.table != "generation" and requests is None
    if requests is None and not timed:
        requests = requests_of(case, settings)
    workload = WorkloadOptions(requests=requests, seed=seed)
    if case.table != "tensors":
        workload = WorkloadOptions(
            requests=requests,
            seed=seed,
            prompt_tokens=settings.prompt_tokens if case.table == "generation" else 1,
            output_tokens=settings.output_tokens,
            tokenizer=served.tokenizer,
        )
    load = LoadOptions(
        concurrency=case.concurrency,
        duration=settings.seconds if timed else settings.longest,
        grace=settings.timeout,
        warmup=0,
        metrics_url="none",
    )
    return Options(target=served.target(case, settings.timeout), workload=workload, load=load)


def run_of(case: Case, report: Report, usage: Used) -> Run:
    units = report.completed if case.table == "tensors" else report.output_tokens
    figures = report.runs[0]
    return Run(
        figures=figures,
        validity=report.validity,
        server_cores=round(usage.server_seconds / figures.duration_s, 3) if figures.duration_s else 0.0,
        server_cpu_us=round(1e6 * usage.server_seconds / units, 1) if units else 0.0,
        front_cpu_us=round(1e6 * usage.front_seconds / units, 1) if units else 0.0,
        foreign_cores=usage.foreign_cores,
    )
