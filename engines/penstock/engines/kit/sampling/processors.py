"""Logits processors of other packages, which requests name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import ProcessorCall
from penstock.engines.errors import InvalidRequestError, PenstockError

logger = logging.getLogger(__name__)

GROUP = "penstock.logit_processors"
"""The entry-point group. Each is a `ProcessorFactory`: a class, as a rule."""

Floats = npt.NDArray[np.float32]


class LogitsProcessor(Protocol):
    """Of one output; may keep state."""

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: Floats) -> None:
        """Changes the logits [vocab] of the next token in place. -inf: not this token. `output` is all that there is so
        far. What it raises ends the request."""
        ...


ProcessorFactory = Callable[[Mapping[str, Any], int], LogitsProcessor]
"""Given the request's parameters and the size of the vocabulary. Raises ValueError for parameters that it does not
take; the client sees the message."""


def processor_names() -> list[str]:
    """Of all that are installed, sorted; nothing is imported."""
    return sorted(_entries())


class ProcessorChain:
    """Those of one output, in order."""

    def __init__(
        self, calls: Sequence[ProcessorCall], prompt: Sequence[int], output: Sequence[int], vocab_size: int
    ) -> None:
        """Raises InvalidRequestError for one that is not installed or refuses its parameters."""
        self._processors = [(call.name, _processor(call, vocab_size)) for call in calls]
        self._prompt, self._output = list(prompt), list(output)
        self.failure: PenstockError | None = None
        """Why the output cannot be continued."""

    def append(self, token_id: int) -> None:
        """Takes note of the output's next token."""
        self._output.append(token_id)

    def apply(self, logits: Floats) -> None:
        """Changes them in place, unless there is a `failure`."""
        for name, processor in self._processors:
            try:
                processor(self._prompt, self._output, logits)
            except Exception:
                logger.exception("the logits processor %r failed", name)
                self.failure = InvalidRequestError(f"The logits processor {name!r} failed.", param="logits_processors")
                return


def _processor(call: ProcessorCall, vocab_size: int) -> LogitsProcessor:
    entry = _entries().get(call.name)
    if entry is None:
        message = f"logits_processors: {call.name[:64]!r} is not installed in the engine."
        raise InvalidRequestError(message, param="logits_processors")
    try:
        factory: ProcessorFactory = entry.load()
        return factory(call.parameters, vocab_size)
    except (ValueError, TypeError, KeyError) as error:
        message = f"logits_processors: {call.name!r} does not take these parameters: {error}"
        raise InvalidRequestError(message, param="logits_processors") from None
    except Exception:  # an error of its own must not fail the step of all requests
        logger.exception("the logits processor %r cannot be made", call.name)
        message = f"logits_processors: {call.name!r} cannot be made with these parameters."
        raise InvalidRequestError(message, param="logits_processors") from None


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
