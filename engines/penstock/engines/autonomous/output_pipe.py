"""A pipe for a batcher's output, from one thread to another, with a file descriptor that tells of news."""

from __future__ import annotations

import threading

from penstock.engines.contract.continuous_batcher import BatcherOutput
from penstock.engines.inbox import Bell


class OutputPipe:
    """However much is put in between two fetches, the descriptor becomes readable once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._pending = BatcherOutput()
        self._failure: Exception | None = None
        self._bell = Bell()
        self.wakeup = self._bell.wakeup

    def put(self, new: BatcherOutput) -> None:
        """Tokens and releases ring; the counts of a step without either wait for them."""
        with self._lock:
            self._pending.tokens += new.tokens
            self._pending.released += new.released
            self._pending.num_scheduled_tokens += new.num_scheduled_tokens
            self._pending.num_preemptions += new.num_preemptions
            if new.tokens or new.released:
                self._bell.ring()

    def ring(self) -> None:
        """There is reason to look, though nothing to fetch."""
        with self._lock:
            self._bell.ring()

    def fail(self, failure: Exception) -> None:
        """The first one counts. What was put in before it can still be fetched."""
        with self._lock:
            self._failure = self._failure or failure
            self._bell.ring()

    def fetch(self) -> BatcherOutput:
        """Raises what `fail` was told, once everything else is fetched."""
        with self._lock:
            output, self._pending = self._pending, BatcherOutput()
            if self._failure is not None and not (output.tokens or output.released):
                raise self._failure
            if self._failure is None:
                self._bell.silence()
        return output

    def close(self) -> None:
        with self._lock:
            self._bell.close()
