"""What waits to be encoded, and which texts make the next batch. A plain data structure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import QueueFullError

_SLOTS_PER_TOKEN = 2
"""Attention is padded to the longest text: a batch may have at most so many times its token budget in padded tokens."""


@dataclass(slots=True, eq=False)
class EncodeRequest:
    """The texts of one call. They may be in several batches, and a batch may have those of several calls."""

    texts: Sequence[TokenizedText]
    rows: list[npt.NDArray[np.float32] | None] = field(init=False)
    """One for each text, once it is computed."""
    taken: int = 0
    """Texts that are in batches already, the first ones."""
    missing: int = field(init=False)
    """Texts without a row."""

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.texts)
        self.missing = len(self.texts)

    @property
    def waiting_tokens(self) -> int:
        return sum(map(len, self.texts[self.taken :]))

    def put(self, number: int, row: npt.NDArray[np.float32]) -> None:
        self.rows[number] = row
        self.missing -= 1


class BatchedText(NamedTuple):
    request: EncodeRequest
    number: int
    """Of the text in its request."""

    @property
    def text(self) -> TokenizedText:
        return self.request.texts[self.number]


class TextQueue:
    """Requests take turns, text by text: one of a thousand texts does not keep one of a single text waiting.

    A batch is as many texts as fit into `max_batched_tokens`; a longer text is a batch by itself.
    """

    def __init__(self, max_batched_tokens: int, max_requests: int, max_tokens: int) -> None:
        """`max_requests` and `max_tokens` may wait."""
        self._max_batched_tokens = max_batched_tokens
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiting: deque[EncodeRequest] = deque()
        self.num_tokens = 0

    def __len__(self) -> int:
        """Requests with texts that wait."""
        return len(self._waiting)

    def add(self, request: EncodeRequest) -> None:
        """Raises QueueFullError. What is larger than the whole queue is let in when nothing else waits."""
        tokens = request.waiting_tokens
        full = len(self) >= self._max_requests or self.num_tokens + tokens > self._max_tokens
        if full and self._waiting:
            raise QueueFullError("Too many texts wait to be encoded.", retry_after=1)
        self._waiting.append(request)
        self.num_tokens += tokens

    def remove(self, request: EncodeRequest) -> None:
        """Nobody waits for it any more. Unknown ones are ignored."""
        if request in self._waiting:
            self._waiting.remove(request)
            self.num_tokens -= request.waiting_tokens

    def take(self) -> list[BatchedText]:
        """The next batch; empty when nothing waits."""
        batch: list[BatchedText] = []
        passed_by: list[EncodeRequest] = []
        tokens = longest = 0
        while self._waiting and tokens < self._max_batched_tokens:
            request = self._waiting.popleft()
            length = len(request.texts[request.taken])
            padded = (len(batch) + 1) * max(longest, length)
            fits = tokens + length <= self._max_batched_tokens
            if batch and not (fits and padded <= _SLOTS_PER_TOKEN * self._max_batched_tokens):
                passed_by.append(request)
                continue
            batch.append(BatchedText(request, request.taken))
            tokens, longest = tokens + length, max(longest, length)
            request.taken += 1
            if request.taken < len(request.texts):
                self._waiting.append(request)
        # the first of them begins the next batch
        self._waiting.extendleft(reversed(passed_by))
        self.num_tokens -= tokens
        return batch
