"""Requests from arrival to their end: bounds, the queue, deadlines, counters, and exactly one terminal output for each.

Shared by our scheduler and by the admission queue in front of engines that schedule by themselves.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    AddRequest,
    FinishReason,
    PoolingParams,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    PenstockError,
    QueueFullError,
    UnsupportedError,
)
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.fair_queue import make_queue
from penstock.engines.scheduler.pending import NeedsOf, PassedBy, Pending, no_needs
from penstock.engines.scheduler.queues import order_key
from penstock.engines.scheduler.request import Request, RequestStatus
from penstock.kvcache.integrity import require


class QueueIntake:
    """Which requests may join the queue, which wait in it, and what their clients are told in the end."""

    def __init__(self, config: SchedulerConfig, info: ModelInfo) -> None:
        self.config = config
        self.info = info
        self._context_length = info.context_length
        self.requests: dict[int, Request] = {}
        """Those without a terminal output so far."""
        self.waiting = make_queue(config.policy)
        self.num_waiting_tokens = 0
        """Known tokens of requests that wait."""
        self._passed_by = PassedBy[Request]()
        self._failed: list[Pending] = []
        """Those that requests may have waited for, since `due`."""
        self.stats = EngineStats(num_blocks=info.num_blocks)
        self.eos = frozenset(info.eos_token_ids)
        self._deadlines = _Deadlines(self.requests.__contains__)
        self._finished: Counter[str] = Counter()
        self._outputs: list[RequestOutput] = []
        """For the clients, since `take_outputs`."""
        self._finish_interval = 0.0
        self._last_finish: float | None = None

    # -- in --------------------------------------------------------------------------------------------------

    def receive(
        self, message: AddRequest, num_waiting: int, free_seats: int, needs_of: NeedsOf = no_needs
    ) -> list[Request]:
        """One Request for each of the message's ids, in order, not queued yet; or none, and the ids end with the
        reason why not. Ids that are in use are ignored."""
        if any(request_id in self.requests for request_id in message.ids):
            return []
        self.stats.admitted += len(message.ids)
        error = self._refusal(message) or self._queue_full(message, num_waiting, free_seats)
        needs = needs_of(message) if error is None else ()
        error = error or next((need.error for need in needs if need.error is not None), None)
        if error is not None:
            for request_id in message.ids:
                self.emit_end(request_id, FinishReason.ERROR, error)
            return []
        samples = self._samples_of(message, needs)
        for request in samples:
            self.requests[request.id] = request
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request.id)
        return samples

    def _samples_of(self, message: AddRequest, needs: Sequence[Pending]) -> list[Request]:
        params = message.params
        stop: frozenset[int] = frozenset()
        seed = None
        if not isinstance(params, PoolingParams):
            seed = params.seed
            stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        samples, of_others = [], _without_prompt_logprobs(message)
        for index, request_id in enumerate(message.ids):
            own_seed = random.getrandbits(63) if seed is None else seed + index
            own = of_others if index else message
            request = Request(request_id, own, own_seed, stop, needs)
            if self.info.whole_tiles:
                spans = [span for image in message.images for span in image.spans]
                request.whole_tiles = [(start, start + count) for start, count in spans]
            request.key = order_key(self.config.policy, request, self.config.ageing_seconds)
            samples.append(request)
        return samples

    def _refusal(self, message: AddRequest) -> PenstockError | None:
        """The error that ends a request which could never run."""
        prompt, params, info = message.prompt_token_ids, message.params, self.info
        pooling = isinstance(params, PoolingParams)
        max_tokens = 1 if isinstance(params, PoolingParams) else params.max_tokens
        if not prompt or max_tokens < 1 or not message.ids:
            return InvalidRequestError("a request needs at least one prompt token and one token to generate")
        if pooling and not info.supports_pooling:
            return UnsupportedError("This engine gives no vectors for this model.")
        if isinstance(params, SamplingParams) and params.grammar is not None and not info.supports_grammars:
            return UnsupportedError("This engine has no structured output for this model.")
        if isinstance(params, SamplingParams) and params.processors and not info.supports_processors:
            return UnsupportedError("This engine has no logits processors.")
        if isinstance(params, SamplingParams) and params.prediction and not info.supports_drafts:
            return UnsupportedError("This engine cannot verify predictions.")
        if pooling and len(message.ids) > 1:
            return InvalidRequestError("a request for a vector has one result")
        if min(prompt) < 0 or max(prompt) >= info.vocab_size:
            wrong = next(t for t in prompt if not 0 <= t < info.vocab_size)
            return InvalidRequestError(
                f"The prompt has the token {wrong}, but the model's vocabulary ends at {info.vocab_size - 1}."
            )
        if message.images:
            error = self._refusal_of_images(message)
            if error is not None:
                return error
        if message.output_token_ids:
            error = self._refusal_to_resume(message, max_tokens)
            if error is not None:
                return error
        total = len(prompt) + (0 if pooling else max_tokens)
        if total > info.max_model_len:
            return ContextLengthError(
                f"This model's maximum context length is {info.max_model_len} tokens; the request asks for "
                f"{len(prompt)} prompt tokens and up to {max_tokens} output tokens."
            )
        if total > self._context_length:
            return ContextLengthError(
                f"The request could grow to {total} tokens, but the KV cache has room for {self._context_length} of "
                "one request."
            )
        return None

    def _refusal_of_images(self, message: AddRequest) -> PenstockError | None:
        grid = self.info.image_grid
        if grid is None:
            return UnsupportedError("This engine reads text only.")
        for image in message.images:
            tokens = [grid.tokens(height, width) for height, width in image.tiles]
            size = sum(3 * height * width for height, width in image.tiles)
            if not all(tokens) or size != len(image.pixels) or sum(count for _, count in image.spans) != sum(tokens):
                return InvalidRequestError("an image does not fit the places that it has in the prompt")
            if self.info.whole_tiles and max(tokens) > self.info.chunk:
                return InvalidRequestError("a tile of an image has more tokens than a step can have")
            if self.info.has_grid_positions and [count for _, count in image.spans] != tokens:
                return InvalidRequestError("an image's tokens must stand one after the other")
        end = 0
        for start, count in [span for image in message.images for span in image.spans]:
            if start < end or count < 1:
                return InvalidRequestError("images must stand one after the other")
            end = start + count
        if end > len(message.prompt_token_ids):
            return InvalidRequestError("an image stands behind the end of its prompt")
        return None

    def _refusal_to_resume(self, message: AddRequest, max_tokens: int) -> PenstockError | None:
        output = message.output_token_ids
        if not self.info.supports_resume:
            return UnsupportedError("This engine cannot go on with what another one has begun.")
        if isinstance(message.params, PoolingParams) or len(message.ids) > 1 or len(output) >= max_tokens:
            return InvalidRequestError("only one sample that is not complete can go on behind its tokens")
        if min(output) < 0 or max(output) >= self.info.vocab_size:
            return InvalidRequestError("the output so far has tokens that the model's vocabulary does not have")
        return None

    def _queue_full(self, message: AddRequest, num_waiting: int, free_seats: int) -> QueueFullError | None:
        excess = num_waiting + len(message.ids) - free_seats
        if excess > self.config.max_queued_requests and num_waiting >= free_seats:
            return self._full(f"{num_waiting} requests are waiting", num_waiting)
        waiting_tokens = self.num_waiting_tokens
        tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
        if waiting_tokens and waiting_tokens + tokens > self.config.max_queued_tokens:
            return self._full(f"{waiting_tokens} prompt tokens are waiting", num_waiting)
        return None

    def _full(self, what: str, num_waiting: int) -> QueueFullError:
        wait = min(60.0, max(1.0, num_waiting * self._finish_interval))
        return QueueFullError(f"The queue is full: {what}. Try again later.", retry_after=wait)

    # -- the queue -------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._passed_by)

    def __iter__(self) -> Iterator[Request]:
        """All that wait, those that are passed by included."""
        yield from self.waiting
        yield from self._passed_by.requests

    def enqueue(self, request: Request) -> None:
        self.waiting.push(request)
        self.num_waiting_tokens += request.num_tokens

    def pop(self) -> Request:
        """The next one, which runs from now on."""
        request = self.waiting.pop()
        self.num_waiting_tokens -= request.num_tokens
        return request

    def pass_by(self, request: Request, pending: Pending) -> None:
        """Lets others overtake the next request, which waits for something that they need not wait for. It keeps its
        place: once that is not pending any more, `requeue_unblocked` puts it back."""
        self.waiting.remove(request)
        self._passed_by.add(request, pending)

    def passed_by(self, request: Request) -> Pending | None:
        """What a request waits for that others may overtake."""
        return self._passed_by.get(request.id)

    def requeue_unblocked(self) -> None:
        """Puts back those that were passed by and wait for nothing any more."""
        if self._passed_by:
            for request in self._passed_by.take_unblocked():
                self.waiting.push(request)

    def failed(self, pending: Pending) -> None:
        """Something that requests wait for has got an error: they end with it (`due`)."""
        self._failed.append(pending)

    @property
    def can_go_on(self) -> bool:
        """Whether some request waits for nothing but room in a step."""
        return len(self.waiting) > 0 or self._passed_by.has_unblocked

    def withdraw(self, request: Request) -> None:
        """Takes a request out that will not run."""
        if not self._passed_by.remove(request):
            self.waiting.remove(request)
        self.num_waiting_tokens -= request.num_tokens

    def check_integrity(self) -> None:
        """Raises IntegrityError when the queue and its counters contradict one another."""
        waiting = list(self)
        require(len(waiting) == self.num_waiting, "the queue's length is wrong")
        require(self.num_waiting_tokens == sum(r.num_tokens for r in waiting), "waiting tokens miscounted")

    # -- out -------------------------------------------------------------------------------------------------

    def due(self, now: float) -> Iterator[tuple[Request, PenstockError]]:
        """Requests that end now, and with which error: their time is over, or what they wait for has failed."""
        if self._failed:
            failed, self._failed = self._failed, []
            for request in list(self.requests.values()):
                error = next((need.error for need in request.needs if need in failed), None)
                if error is not None:
                    yield request, error
        for request_id in self._deadlines.due(now):
            late = self.requests.get(request_id)
            if late is not None:
                what = "scheduled" if late.first_scheduled is None else "complete"
                yield late, DeadlineExceededError(f"The request's time was over before it was {what}.")

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a live request."""
        return self._deadlines.next()

    def ended(self, request: Request, now: float) -> None:
        """Books the end of a request that was already taken out of its list.

        Keeps a moving average of the time between two ends, from which `retry_after` is estimated. The time in which
        there is no request at all does not count: it does not tell how long service takes.
        """
        request.status = RequestStatus.FINISHED
        del self.requests[request.id]
        if self._last_finish is not None:
            self._finish_interval += 0.1 * (now - self._last_finish - self._finish_interval)
        self._last_finish = now if self.requests else None

    def emit(self, outputs: Sequence[RequestOutput]) -> None:
        """What a step has brought requests."""
        self._outputs += outputs
        for output in outputs:
            if output.finish_reason is not None:
                reason, error = str(output.finish_reason), output.error
                self._finished[reason if error is None else f"{reason}:{error.code}"] += 1

    def emit_end(self, request_id: int, reason: FinishReason, error: PenstockError | None = None) -> None:
        """Tells the client of an end outside of a step's results: refused, timed out, aborted, failed."""
        self.emit([RequestOutput(request_id, [], reason, error=None if error is None else RequestError.of(error))])

    def take_outputs(self) -> list[RequestOutput]:
        """What was emitted since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- what operators see ----------------------------------------------------------------------------------

    def looked_up(self, num_tokens: int, num_cached: int) -> None:
        """Counts a prompt's first look into the prefix cache."""
        self.stats.prefix_queries += num_tokens
        self.stats.prefix_hits += num_cached

    def stepped(self, num_prompt_tokens: int, num_sampled: int) -> None:
        """Counts a step that succeeded: the prompt tokens that it computed, and the new tokens that clients got."""
        self.stats.steps += 1
        self.stats.prompt_tokens += num_prompt_tokens
        self.stats.generation_tokens += num_sampled

    def snapshot(self) -> EngineStats:
        """The same object each time, its gauges left to the caller."""
        self.stats.finished = dict(self._finished)
        self.stats.num_waiting_tokens = self.num_waiting_tokens
        return self.stats


def _without_prompt_logprobs(message: AddRequest) -> AddRequest:
    """For the samples behind the first: a long prompt's logprobs are large, and the same for all."""
    if isinstance(message.params, PoolingParams) or message.params.prompt_logprobs is None:
        return message
    return msgspec.structs.replace(message, params=msgspec.structs.replace(message.params, prompt_logprobs=None))


class _Deadlines:
    """Deadlines of all live requests, in a heap, so that asking which are due needs no scan of the queue.

    Entries of finished requests stay until they reach the top or until most of the heap is stale.
    """

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int]] = []
        self._compact_at = 1024

    def add(self, deadline: float, request_id: int) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
            self._compact_at = max(1024, 2 * len(self._heap))

    def due(self, now: float) -> list[int]:
        """Takes out the ids whose time has come; finished ones may be among them."""
        ids = []
        while self._heap and self._heap[0][0] <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids

    def next(self) -> float | None:
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
