"""Masks of the steps' requests with grammars, in vLLM's words."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput

from penstock.engines.kit.grammars import Grammars
from penstock.engines.vllm.step import Row


class StepMasks:
    """Follows outputs through their grammars on vLLM's thread. There a step is sampled before its result is taken in
    elsewhere, and the next step's masks need its tokens."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._sampled: deque[tuple[list[Row], Future[Any]]] = deque()
        """Results with tokens that grammars have not taken in yet."""

    def of(self, rows: Sequence[Row]) -> GrammarOutput | None:
        """For a step of these that is about to sample. Waits for the steps before it, if they sampled for grammars."""
        while self._sampled:
            self._take_in(*self._sampled.popleft())
        masked = [
            (name, request.grammar)
            for request, name, samples in rows
            if samples and request.grammar is not None and not request.grammar.is_free
        ]
        if not masked:
            return None
        masks = self._grammars.bit_masks([grammar for _, grammar in masked])
        return GrammarOutput([name for name, _ in masked], masks)

    def sampled(self, rows: Sequence[Row], result: Future[Any]) -> None:
        """A step of these has begun to sample."""
        followed = [row for row in rows if row.samples and row.request.grammar is not None]
        if followed:
            self._sampled.append((followed, result))

    def forget(self) -> None:
        """The results of steps under way will not count."""
        self._sampled.clear()

    def _take_in(self, rows: Sequence[Row], result: Future[Any]) -> None:
        output = result.result()
        for request, name, _ in rows:
            for token_id in output.sampled_token_ids[output.req_id_to_index[name]]:
                if request.grammar is not None:
                    request.grammar.append(int(token_id))
