"""A server that is ready, and one run of the load test against it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from tempfile import NamedTemporaryFile

import msgspec
import numpy as np

from benchmarks.peers.launch import Launch
from benchmarks.peers.plan import HISTORY, ORDERED, PICTURE, TENSORS, TURN_TOKENS, TURNS, Case, requests_of
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
        with messages(case, seed) as dataset:
            options = options_of(self, case, settings, seed=seed, dataset=dataset)
            meter = Meter(self.pid)
            report, samples = self._report(options)
            return run_of(case, report, samples, meter.read())

    def try_out(self, case: Case, settings: PeersSettings, requests: int) -> Report:
        """Requests that do not count, all at once."""
        case = msgspec.structs.replace(case, concurrency=requests)
        return self._report(options_of(self, case, settings, seed=-1, requests=requests))[0]

    def _report(self, options: Options) -> tuple[Report, list[Sample]]:
        protocol = options.target.protocol
        test = LoadTest(options, Quiet(), calibration=self._calibrations.get(protocol))
        report = test.run_here()
        if test.interrupted:
            raise KeyboardInterrupt
        if test.calibration is not None:
            self._calibrations[protocol] = test.calibration
        return report, test.samples

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
    served: Served,
    case: Case,
    settings: PeersSettings,
    *,
    seed: int,
    requests: int | None = None,
    dataset: str | None = None,
) -> Options:
    """The load of one run: so many requests for each place (generation), a session, a file, or so many seconds.
    `requests`: a trial, with so many."""
    trial, timed = requests is not None, False
    if requests is None:
        timed = case.table in _TIMED
        requests = None if timed else requests_of(case, settings)
    workload = WorkloadOptions(requests=requests, seed=seed)
    if dataset is not None:
        workload = WorkloadOptions(seed=seed, dataset=dataset, output_tokens=settings.output_tokens)
    elif case.table != "tensors":
        workload = WorkloadOptions(
            requests=requests,
            seed=seed,
            prompt_tokens=1 if case.table in _TIMED else settings.prompt_tokens,
            output_tokens=settings.output_tokens,
            tokenizer=served.tokenizer,
        )
    if case.table == "turns" and not trial:
        workload = msgspec.structs.replace(
            workload,
            turns=TURNS,
            shared_prefix_tokens=HISTORY,
            prompt_tokens=TURN_TOKENS - settings.output_tokens,
        )
    load = LoadOptions(
        concurrency=case.concurrency,
        duration=None if case.table in ORDERED else settings.seconds if timed else settings.longest,
        grace=settings.timeout,
        warmup=0,
        metrics_url="none",
    )
    return Options(target=served.target(case, settings.timeout), workload=workload, load=load)


_TIMED = ("tensors", "paced", "streaming")


def run_of(case: Case, report: Report, samples: Sequence[Sample], usage: Used) -> Run:
    units = report.completed if case.table == "tensors" else report.output_tokens
    figures = report.runs[0]
    return Run(
        figures=figures,
        validity=report.validity,
        server_cores=round(usage.server_seconds / figures.duration_s, 3) if figures.duration_s else 0.0,
        server_cpu_us=round(1e6 * usage.server_seconds / units, 1) if units else 0.0,
        front_cpu_us=round(1e6 * usage.front_seconds / units, 1) if units else 0.0,
        foreign_cores=usage.foreign_cores,
        ttft_ms=first_tokens(samples) if case.table in ORDERED else [],
    )


def first_tokens(samples: Sequence[Sample]) -> list[float]:
    """Of requests with an answer, in their order."""
    answered = sorted((sample for sample in samples if sample.arrivals), key=lambda sample: sample.index)
    return [round(1e3 * (sample.arrivals[0] - sample.sent), 3) for sample in answered]


QUESTION = "What is in it?"
_WAVES = 6
"""Of brightness, in each colour of a picture."""


@contextmanager
def messages(case: Case, seed: int) -> Iterator[str | None]:
    """The file of a run with images: the same request twice, with a picture that no other seed has."""
    if case.table != "images":
        yield None
        return
    url = f"data:image/jpeg;base64,{base64.b64encode(picture(seed)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    line = msgspec.json.encode({"messages": [{"role": "user", "content": parts}]}) + b"\n"
    with NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(2 * line)
        file.flush()
        yield file.name


def picture(seed: int) -> bytes:
    """A JPEG of `PICTURE`'s size: waves with some noise, which takes as many bytes as a photograph."""
    from PIL import Image

    rng = np.random.default_rng(abs(seed))
    width, height = PICTURE
    y, x = np.mgrid[0:height, 0:width] / width
    pixels = rng.normal(0, 6, (height, width, 3))
    for colour, steep, flat, phase in rng.uniform(0, 20, (3 * _WAVES, 4)):
        pixels[..., int(colour) % 3] += 20 * np.sin(steep * x + flat * y + phase)
    buffer = BytesIO()
    Image.fromarray(np.clip(pixels + 128, 0, 255).astype(np.uint8)).save(buffer, "jpeg", quality=90)
    return buffer.getvalue()
