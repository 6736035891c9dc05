"""`penstock bench perplexity`: how well a model predicts a text, and how far other settings move it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import AddRequest, DownMessage, SamplingParams
from penstock.engines.core import EngineCore
from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from penstock.engines.kit.step_runner import StepRunner
from penstock.gateway.commands.bench.figures import this_machine
from penstock.gateway.commands.bench.loading import Wanted, find, load
from penstock.gateway.commands.bench.options import COMPARABLE, PerplexityBench
from penstock.gateway.commands.bench.perplexity_report import Divergence, PerplexityReport, PerplexityRow, table
from penstock.gateway.commands.bench.text import first_token, read_text
from penstock.gateway.configuration.config import Config, ConfigError, overlay

_ROWS_AT_A_TIME = 32
"""Bounds the memory: each takes a few arrays of the vocabulary's size in 64 bits."""

Doubles = npt.NDArray[np.float64]


def kl_divergences(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> Doubles:
    """[N], in nats: what of the information in softmax(reference) is lost with softmax(other), of logits [N, vocab]."""
    divergences = [
        _divergences(reference[start : start + _ROWS_AT_A_TIME], other[start : start + _ROWS_AT_A_TIME])
        for start in range(0, len(reference), _ROWS_AT_A_TIME)
    ]
    return np.concatenate(divergences) if divergences else np.zeros(0)


def _divergences(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> Doubles:
    p, q = _log_softmax(reference), _log_softmax(other)
    lost: Doubles = (np.exp(p) * (p - q)).sum(axis=1)
    return np.maximum(lost, 0.0)  # rounding may leave less than nothing


def _log_softmax(logits: npt.NDArray[np.float32]) -> Doubles:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TextWindow:
    """A part of the text, with tokens that were in the window before as context."""

    token_ids: list[int]
    num_new: int
    """Of its last tokens, which count here. The first one of a window never does: nothing is before it."""


def windows(token_ids: Sequence[int], length: int, stride: int, first: int | None = None) -> Iterator[TextWindow]:
    """Of at most `length` tokens, each `stride` tokens, fewer than `length`, further than the one before. `first`: the
    token that begins every window, as a beginning of a text does in training; None: there is none. Every token counts
    once, the first of the text only where something is before it."""
    lead = [] if first is None else [first]
    room = length - len(lead)
    counted = 0
    for begin in range(0, len(token_ids), stride):
        part = list(token_ids[begin : begin + room])
        new = min(begin + len(part) - counted, len(lead) + len(part) - 1)
        if new > 0:
            yield TextWindow([*lead, *part], new)
        counted = begin + len(part)
        if counted == len(token_ids):
            return


class Scorer:
    """Runs windows through an engine core, one at a time."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._next_id = 0

    @property
    def has_distributions(self) -> bool:
        """The runner shows whole rows of logits."""
        return isinstance(self._core.runner, StepRunner)

    def logprobs(self, window: TextWindow) -> list[float]:
        """Natural logarithms of the probabilities of its new tokens. Raises PenstockError."""
        self._next_id += 1
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
        request = AddRequest((self._next_id,), window.token_ids, params, time.monotonic())
        logprobs = self._answer([request])
        return logprobs[len(logprobs) - window.num_new :]

    def distributions(self, window: TextWindow) -> tuple[list[float], Floats]:
        """`logprobs`, and the logits [new tokens, vocab] that they are of."""
        runner = self._core.runner
        assert isinstance(runner, StepRunner)
        rows: list[Floats] = []
        left_out = len(window.token_ids) - 1 - window.num_new
        seen = 0

        def watch(request_id: int, logits: Floats) -> None:
            nonlocal seen
            rows.append(logits[max(0, left_out - seen) :].copy())
            seen += len(logits)

        runner.watch_prompt_logits = watch
        try:
            logprobs = self.logprobs(window)
        finally:
            runner.watch_prompt_logits = None
        return logprobs, np.concatenate(rows)

    def _answer(self, messages: Iterable[DownMessage]) -> list[float]:
        logprobs: list[float] = []
        while not self._core.broken:
            for output in self._core.step(messages).outputs:
                if output.error is not None:
                    raise output.error.raised()
                if output.prompt is not None:
                    logprobs = [entry.logprob for entry in output.prompt.logprobs or ()]
                if output.finish_reason is not None:
                    return logprobs
            messages = ()
        raise EngineError("The engine has failed.")


__all__ = ["run", "table"]

_WINDOW = 512


def run(config: Config, options: PerplexityBench, file: Path | None = None) -> PerplexityReport:
    """Raises ConfigError, PenstockError, OSError."""
    machine = this_machine()
    configs = [config, *(overlay(config, compared(settings)) for settings in options.compare)]
    targets = [find(overlay(item, {"max_num_seqs": 1})) for item in configs]
    tokenizer = targets[0].tokenizer
    text, token_ids = read_text(tokenizer, options, file)
    first = first_token(tokenizer)
    with ExitStack() as stack:
        cores = [_core(item, stack) for item in targets]
        length = _window_length(options, cores)
        stride = options.stride or max(1, length // 2)
        if stride >= length:
            raise InvalidRequestError(f"stride {stride} is not below context-length, {length}")
        scored = [_Scored(settings, core) for settings, core in zip(("", *options.compare), cores, strict=True)]
        for window in windows(token_ids, length, stride, first):
            _score(scored, window)
        rows = [item.row() for item in scored]
        lacking = [item.runner for item in scored if not item.scorer.has_distributions]
    return PerplexityReport(
        machine=machine,
        model=targets[0].name,
        text=text,
        context_length=length,
        stride=stride,
        begins_with=first,
        counted=len(scored[0].logprobs),
        rows=rows,
        without_divergence=f"{lacking[0]} does not show whole distributions" if lacking and options.compare else "",
    )


def compared(settings: str) -> dict[str, str]:
    """`weights=int4,threads=2` by name. Raises ConfigError."""
    values = {}
    for part in settings.split(","):
        name, equals, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in COMPARABLE:
            raise ConfigError(f"compare: {part!r} is none of the settings of a model, as NAME=VALUE")
        values[name] = value.strip()
    return values


@dataclass(slots=True)
class _Scored:
    """The figures of one row."""

    settings: str
    core: EngineCore
    scorer: Scorer = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    divergences: list[Doubles] = field(default_factory=list)
    num_same_best: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.core)

    @property
    def runner(self) -> str:
        return self.core.info.runner

    def add(self, window: TextWindow, *, distributions: bool) -> Floats | None:
        """Its logits, if they are asked for."""
        started = time.perf_counter()
        logits = None
        if distributions:
            logprobs, logits = self.scorer.distributions(window)
        else:
            logprobs = self.scorer.logprobs(window)
        self.seconds += time.perf_counter() - started
        self.logprobs += logprobs
        return logits

    def row(self) -> PerplexityRow:
        losses = -np.array(self.logprobs)
        perplexity = math.exp(losses.mean())
        return PerplexityRow(
            settings=self.settings,
            runner=self.runner,
            perplexity=perplexity,
            error=perplexity * float(losses.std()) / math.sqrt(len(losses)),
            seconds=self.seconds,
            divergence=self._divergence(),
        )

    def _divergence(self) -> Divergence | None:
        if not self.divergences:
            return None
        lost = np.concatenate(self.divergences)
        return Divergence(
            mean=float(lost.mean()),
            median=float(np.median(lost)),
            p99=float(np.percentile(lost, 99)),
            most=float(lost.max()),
            same_best=self.num_same_best / len(lost),
        )


def _score(scored: Sequence[_Scored], window: TextWindow) -> None:
    """All models see a window before the next one, so that only one window's distributions have to be kept."""
    comparing = len(scored) > 1 and scored[0].scorer.has_distributions
    reference = scored[0].add(window, distributions=comparing)
    for other in scored[1:]:
        logits = other.add(window, distributions=comparing and other.scorer.has_distributions)
        if reference is None or logits is None:
            continue
        other.divergences.append(kl_divergences(reference, logits))
        other.num_same_best += int(np.count_nonzero(reference.argmax(axis=1) == logits.argmax(axis=1)))


def _core(target: Wanted, stack: ExitStack) -> EngineCore:
    runner, _ = load(target)
    core = EngineCore(runner, target.spec.scheduler, time.monotonic)
    stack.callback(core.close)
    if not runner.info.supports_logprobs:
        raise UnsupportedError(f"the {runner.info.runner} engine has no logprobs, and so no perplexity")
    return core


def _window_length(options: PerplexityBench, cores: Sequence[EngineCore]) -> int:
    most = min(core.info.context_length for core in cores) - 1  # the engine generates a token behind it
    if (options.context_length or 0) > most:
        raise InvalidRequestError(
            f"context-length {options.context_length}: with one token that is generated, "
            f"the context has room for {most}"
        )
    return options.context_length or min(_WINDOW, most)
