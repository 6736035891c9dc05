"""A whole generation as one result per choice, for answers that do not stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from penstock.gateway.llm.dataplane import ChoiceDelta, TokenLogprob
from penstock.tokenizers import Part


@dataclass(slots=True)
class Collected:
    """All deltas of one choice, joined."""

    texts: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.parts += delta.parts or ()
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


async def collect(deltas: AsyncIterator[list[ChoiceDelta]], choices: int) -> list[Collected]:
    """Raises the error that ended a choice, if one did."""
    collected = [Collected() for _ in range(choices)]
    async for batch in deltas:
        _add(batch, collected)
    return collected


async def collecting(
    deltas: AsyncIterator[list[ChoiceDelta]], collected: Sequence[Collected]
) -> AsyncIterator[list[ChoiceDelta]]:
    """The same deltas again, which join what there is of their choices."""
    async for batch in deltas:
        _add(batch, collected)
        yield batch


def _add(deltas: Sequence[ChoiceDelta], collected: Sequence[Collected]) -> None:
    for delta in deltas:
        collected[delta.index].add(delta)
