"""Log-probabilities of the tokens of a text, by an engine's own prompt logprobs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import AddRequest, DownMessage, SamplingParams
from penstock.engines.core import EngineCore
from penstock.engines.errors import EngineError
from penstock.engines.kit.step_runner import StepRunner

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the text, with tokens that were in the window before as context."""

    token_ids: list[int]
    num_new: int
    """Of its last tokens, which count here. The first one of a window never does: nothing is before it."""


def windows(token_ids: Sequence[int], length: int, stride: int, first: int | None = None) -> Iterator[Window]:
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
            yield Window([*lead, *part], new)
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

    def logprobs(self, window: Window) -> list[float]:
        """Natural logarithms of the probabilities of its new tokens. Raises PenstockError."""
        self._next_id += 1
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
        request = AddRequest((self._next_id,), window.token_ids, params, time.monotonic())
        found = self._answer([request])
        return found[len(found) - window.num_new :]

    def distributions(self, window: Window) -> tuple[list[float], Floats]:
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
            found = self.logprobs(window)
        finally:
            runner.watch_prompt_logits = None
        return found, np.concatenate(rows)

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
