"""`EncoderEngine`: a thread that encodes what calls on the event loop ask for.

The compiled model releases the GIL, so it needs no process of its own. The thread takes its next batch from the queue
when it has finished one: what came in meanwhile is in it, and the loop is woken once for a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.encoder.text import Encoder, EncoderInfo, TokenizedText, Vectors
from penstock.engines.errors import NotReadyError, NumericalError, PenstockError, QueueFullError, StepFailedError

logger = logging.getLogger(__name__)

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


@dataclass(slots=True)
class EncoderStats:
    """Counters since the start."""

    batches: int = 0
    texts: int = 0
    tokens: int = 0
    failures: int = 0
    """Batches that raised."""
    busy_seconds: float = 0.0


class EncoderEngine:
    """Lives on the event loop. Each call of `encode` ends exactly once: with its rows, or with an error."""

    def __init__(self, load: Callable[[Report], Encoder], queue: TextQueue, report: Report = silent) -> None:
        """`load` is called once, in a thread; `report` is told on the event loop how far it is."""
        self.stats = EncoderStats()
        self._load = load
        self._report = report
        self._encoder: Encoder | None = None
        self._queue = queue
        self._changed = threading.Condition()
        """Hold it to look into the queue."""
        self._waiters: dict[EncodeRequest, asyncio.Future[None]] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def info(self) -> EncoderInfo:
        """Raises NotReadyError before it has been loaded."""
        if self._encoder is None:
            raise NotReadyError("The model is still loading.", retry_after=2)
        return self._encoder.info

    @property
    def ready(self) -> bool:
        return self._thread is not None and not self._stopping

    @property
    def waiting(self) -> tuple[int, int]:
        """Requests with texts in the queue, and the tokens of these texts."""
        with self._changed:
            return len(self._queue), self._queue.num_tokens

    async def start(self) -> None:
        """Returns when it can encode. Raises PenstockError."""
        loop = asyncio.get_running_loop()

        def report(loading: Loading) -> None:
            loop.call_soon_threadsafe(self._report, loading)

        self._encoder = await asyncio.to_thread(self._load, report)
        # A daemon: a model that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, args=(self._encoder, loop), name="encoder", daemon=True)
        self._thread.start()

    async def encode(self, texts: Sequence[TokenizedText]) -> Vectors:
        """A row for each text, or for each token of each text; no text is empty. Cancelling takes those that are in no
        batch yet out of the queue. Raises QueueFullError, NotReadyError, EngineError."""
        if not self.ready:
            raise NotReadyError("The model is not ready.", retry_after=2)
        request = EncodeRequest(texts)
        done = self._waiters[request] = asyncio.get_running_loop().create_future()
        try:
            with self._changed:
                self._queue.add(request)
                self._changed.notify()
            await done
        finally:
            del self._waiters[request]
            if request.missing:
                with self._changed:
                    self._queue.remove(request)
        return np.vstack([row for row in request.rows if row is not None])

    async def stop(self) -> None:
        """Ends what still waits with NotReadyError; returns when the batch under way is over."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        for done in self._waiters.values():
            if not done.done():
                done.set_exception(NotReadyError("The model is being unloaded."))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._encoder = None

    def _main(self, encoder: Encoder, loop: asyncio.AbstractEventLoop) -> None:
        while batch := self._next_batch():
            started = time.monotonic()
            errors = self._compute(encoder, batch)
            self._count(batch, time.monotonic() - started)
            ended = {text.request: errors.get(text.request) for text in batch}
            # After the loop has been closed there is nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end, ended)

    def _next_batch(self) -> list[BatchedText]:
        """Empty when the engine stops."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or len(self._queue))
            return [] if self._stopping else self._queue.take()

    def _count(self, batch: Sequence[BatchedText], seconds: float) -> None:
        self.stats.batches += 1
        self.stats.texts += len(batch)
        self.stats.tokens += sum(len(text.text) for text in batch)
        self.stats.busy_seconds += seconds

    def _compute(self, encoder: Encoder, batch: Sequence[BatchedText]) -> dict[EncodeRequest, PenstockError]:
        """Puts the rows into the requests. When a batch raises, its texts are computed one by one, so that only the
        requests of the guilty ones fail."""
        try:
            rows = encoder.compute([text.text for text in batch])
        except Exception as error:
            self.stats.failures += 1
            if len(batch) == 1:
                logger.exception("A text could not be encoded")
                return {batch[0].request: StepFailedError(f"The text could not be encoded: {type(error).__name__}.")}
            logger.warning("a batch of %d texts failed and is computed text by text: %r", len(batch), error)
            return {key: error for text in batch for key, error in self._compute(encoder, [text]).items()}
        failures: dict[EncodeRequest, PenstockError] = {}
        for text, row in zip(batch, rows, strict=True):
            text.request.put(text.number, row)
            if not np.isfinite(row.sum()):
                failures[text.request] = NumericalError("The model gave numbers that are not finite.")
        return failures

    def _end(self, ended: dict[EncodeRequest, PenstockError | None]) -> None:
        """On the loop: whatever is complete, or has failed."""
        for request, error in ended.items():
            done = self._waiters.get(request)
            if done is None or done.done():
                continue
            if error is not None:
                done.set_exception(error)
            elif not request.missing:
                done.set_result(None)
