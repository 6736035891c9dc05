"""OpenVINO GenAI: no server, but a program that takes jobs on its standard input (`foreign/genai_load.py`)."""

from __future__ import annotations

import selectors
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.peers.plan import Case, requests_of
from benchmarks.peers.process import Process
from benchmarks.peers.results import Run
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
        total = requests_of(case, settings)
        meter = Meter(self.pid)
        outcome = self._ask(case.concurrency, self._prompts(settings, total, seed), settings, sampled=case.sampled)
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
        )

    def try_out(self, settings: PeersSettings, requests: int) -> int:
        """Output tokens of requests that do not count."""
        outcome = self._ask(requests, self._prompts(settings, requests, -1), settings)
        return sum(tokens for request in outcome.requests for _, tokens in request.arrivals)

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

    def _ask(
        self, concurrency: int, prompts: Sequence[Any], settings: PeersSettings, *, sampled: bool = False
    ) -> _Outcome:
        job = {
            "prompts": prompts,
            "concurrency": concurrency,
            "output_tokens": settings.output_tokens,
            "sampled": sampled,
        }
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
