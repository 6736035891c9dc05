"""OpenVINO GenAI: no server, but programs that take jobs on their standard input (`foreign/genai_load.py`, and
`foreign/genai_images.py`)."""

from __future__ import annotations

import base64
import selectors
from typing import Any

import msgspec

from benchmarks.peers.plan import ORDERED, Case, requests_of
from benchmarks.peers.process import Process
from benchmarks.peers.results import Run
from benchmarks.peers.served import QUESTION, first_tokens, picture
from benchmarks.peers.settings import PeersSettings
from benchmarks.peers.usage import Meter
from penstock.loadtest import workload
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import summarize
from penstock.loadtest.options import LoadOptions, Options, Target, WorkloadOptions
from penstock.loadtest.report.model import Validity


class _Request(msgspec.Struct):
    sent: float
    ended: float
    arrivals: list[tuple[float, int]]


class _Outcome(msgspec.Struct):
    seconds: float
    requests: list[_Request]


class InProcess:
    def __init__(self, process: Process, tokenizer: str, timeout: float) -> None:
        """Waits until the model is loaded. Raises LoadTestError."""
        self.process = process
        self._tokenizer = tokenizer
        self._read(timeout)

    @property
    def pid(self) -> int:
        return self.process.pid

    def measure(self, case: Case, settings: PeersSettings, seed: int) -> Run:
        """Raises LoadTestError when the program has ended, or does not answer in time."""
        job = self._job(case, settings, requests_of(case, settings), case.concurrency, seed)
        meter = Meter(self.pid)
        outcome = self._ask(job, settings)
        usage = meter.read()
        samples = [_sample(index, request, settings) for index, request in enumerate(outcome.requests)]
        figures = summarize(samples, open_loop=False)
        cpu_us = round(1e6 * usage.server_seconds / figures.output_tokens, 1)
        return Run(
            figures=figures,
            validity=Validity(verdict="valid"),
            server_cores=round(usage.server_seconds / outcome.seconds, 3),
            server_cpu_us=cpu_us,
            front_cpu_us=cpu_us,
            foreign_cores=usage.foreign_cores,
            ttft_ms=first_tokens(samples) if case.table in ORDERED else [],
        )

    def try_out(self, case: Case, settings: PeersSettings, requests: int) -> int:
        """Output tokens of requests that do not count; without pictures, which take long."""
        job = self._job(case, settings, requests, requests, -1)
        outcome = self._ask(job | {"image": None} if "image" in job else job, settings)
        return sum(tokens for request in outcome.requests for _, tokens in request.arrivals)

    def _job(self, case: Case, settings: PeersSettings, requests: int, at_a_time: int, seed: int) -> dict[str, Any]:
        if case.table == "images":
            image = base64.b64encode(picture(seed)).decode()
            return {
                "image": image,
                "prompt": QUESTION,
                "times": requests,
                "output_tokens": settings.output_tokens,
            }
        return {
            "prompts": self._prompts(settings, requests, seed),
            "concurrency": at_a_time,
            "output_tokens": settings.output_tokens,
            "sampled": case.sampled,
        }

    def _prompts(self, settings: PeersSettings, count: int, seed: int) -> list[Any]:
        """Those that servers get, too."""
        options = Options(
            target=Target(url="http://127.0.0.1", protocol="openai-completions"),
            workload=WorkloadOptions(
                requests=count,
                prompt_tokens=settings.prompt_tokens,
                output_tokens=settings.output_tokens,
                tokenizer=self._tokenizer or None,
            ),
            load=LoadOptions(concurrency=count),
        )
        return [call.prompt for session in workload.build(options, seed=seed) for call in session.calls]

    def _ask(self, job: dict[str, Any], settings: PeersSettings) -> _Outcome:
        try:
            self.process.stdin.write(msgspec.json.encode(job) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.process.failure("it has ended") from None
        return msgspec.json.decode(self._read(settings.timeout), type=_Outcome)

    def _read(self, seconds: float) -> bytes:
        """A line, waited for."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise self.process.failure(f"no answer within {seconds:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise self.process.failure("it has ended")
        return line


def _sample(index: int, request: _Request, settings: PeersSettings) -> Sample:
    return Sample(
        index=index,
        intended=request.sent,
        sent=request.sent,
        ended=request.ended,
        arrivals=[time for time, _ in request.arrivals],
        pieces=[tokens for _, tokens in request.arrivals],
        reads=len(request.arrivals),
        wanted_prompt_tokens=settings.prompt_tokens,
        wanted_output_tokens=settings.output_tokens,
    )
