"""Who may join the queue: what can never fit is refused at once, and so is what finds the queue full."""

from __future__ import annotations

from penstock.engines.contract.messages import AddRequest
from penstock.engines.errors import (
    ContextLengthError,
    InvalidRequestError,
    PenstockError,
    QueueFullError,
)
from penstock.engines.scheduler.config import SchedulerConfig


class Admission:
    """Bounds that a request must keep in order to be queued. Counts what waits."""

    def __init__(self, config: SchedulerConfig, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._config = config
        self._capacity = num_blocks * block_size
        self._max_model_len = max_model_len
        self.num_waiting_tokens = 0
        """Known tokens of waiting requests, followers counted with their leader."""
        self._finish_interval = 0.0
        self._last_finish: float | None = None

    def refusal(self, message: AddRequest, num_waiting: int, free_seats: int) -> PenstockError | None:
        """The error that ends this request before it begins, or None."""
        prompt, params = message.prompt_token_ids, message.params
        if not prompt or params.max_tokens < 1 or not message.ids:
            return InvalidRequestError("a request needs at least one prompt token and one token to generate")
        total = len(prompt) + params.max_tokens
        if total > self._max_model_len:
            return ContextLengthError(
                f"This model's maximum context length is {self._max_model_len} tokens; the request asks for "
                f"{len(prompt)} prompt tokens and up to {params.max_tokens} output tokens."
            )
        if total > self._capacity:
            return ContextLengthError(
                f"The request could grow to {total} tokens, but the whole KV cache holds {self._capacity}."
            )
        return self._queue_full(len(message.ids), len(prompt), num_waiting, free_seats)

    def _queue_full(
        self, num_requests: int, num_tokens: int, num_waiting: int, free_seats: int
    ) -> QueueFullError | None:
        excess = num_waiting + num_requests - free_seats
        if excess > self._config.max_queued_requests and num_waiting >= free_seats:
            return self._full(f"{num_waiting} requests are waiting", num_waiting)
        waiting_tokens = self.num_waiting_tokens
        if waiting_tokens and waiting_tokens + num_tokens > self._config.max_queued_tokens:
            return self._full(f"{waiting_tokens} prompt tokens are waiting", num_waiting)
        return None

    def _full(self, what: str, num_waiting: int) -> QueueFullError:
        wait = min(60.0, max(1.0, num_waiting * self._finish_interval))
        return QueueFullError(f"The queue is full: {what}. Try again later.", retry_after=wait)

    def finished(self, now: float, *, idle: bool) -> None:
        """Keeps a moving average of the time between two finished requests, from which `retry_after` is estimated.

        `idle`: nobody is left. How long it takes until somebody comes says nothing about how long service takes.
        """
        if self._last_finish is not None:
            self._finish_interval += 0.1 * (now - self._last_finish - self._finish_interval)
        self._last_finish = None if idle else now
