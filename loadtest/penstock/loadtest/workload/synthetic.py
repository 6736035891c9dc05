"""Sessions of synthetic prompts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

from penstock.loadtest.messages import Call
from penstock.loadtest.options import WorkloadOptions
from penstock.loadtest.workload.contents import TENSORS, Contents, spread

_PREFIXES = 256


class Part(Protocol):
    """One kind of sessions."""

    @property
    def skipped(self) -> int:
        """Sessions of a file that cannot be sent."""
        ...

    @property
    def total(self) -> int | None:
        """Calls that it has; None: without end."""
        ...

    def size(self, nth: int) -> int | None:
        """Calls of its nth session; None: it has no more."""
        ...

    def calls(self, nth: int, number: int, index: int) -> list[Call]:
        """Of its nth session, which is the run's session `number` and begins with call `index`."""
        ...


class Synthetic:
    skipped = 0
    total = None

    def __init__(self, options: WorkloadOptions, contents: Contents, tag: str) -> None:
        self._options = options
        self._contents = contents
        self._tag = tag
        self._prefix = lru_cache(maxsize=_PREFIXES)(self._make_prefix)

    def size(self, nth: int) -> int | None:
        return self._options.turns

    def calls(self, nth: int, number: int, index: int) -> list[Call]:
        options, contents = self._options, self._contents
        rng = contents.rng("session", number)
        calls = []
        for turn in range(options.turns):
            tokens = spread(options.prompt_tokens, options.prompt_tokens_stddev, rng)
            output = spread(options.output_tokens, options.output_tokens_stddev, rng)
            lead: list[Any] = []
            lead_tokens, length = 0, tokens
            if turn == 0:
                tokens = contents.own_tokens(tokens)
                if options.shared_prefix_tokens:
                    lead_tokens = options.shared_prefix_tokens
                    lead = [self._prefix(rng.randrange(options.prefixes))]
            prompt: Any = ""
            if contents.protocol not in TENSORS:
                prompt = contents.source.prompt(lead, lead_tokens, tokens, rng, index + turn)
            call = Call(
                index=index + turn,
                prompt=prompt,
                prompt_tokens=contents.known_tokens(lead_tokens + tokens),
                asked_prompt_tokens=contents.asked_tokens(lead_tokens + length),
                output_tokens=contents.output_tokens(output),
                delay=options.turn_delay if turn else 0.0,
                tag=self._tag,
            )
            calls.append(call)
        return calls

    def _make_prefix(self, number: int) -> Any:
        rng = self._contents.rng("prefix", self._tag, number)
        return self._contents.source.piece(self._options.shared_prefix_tokens, rng)
