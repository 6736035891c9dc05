"""A simulated engine that runs by itself, as TensorRT-LLM does: in a thread, with a file descriptor that says when."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from penstock.engines.autonomous.messages import BatcherOutput, StartRequest
from penstock.engines.messages import ModelInfo
from penstock.engines.simulated.batcher import SimulatedBatcher


class OwnThread:
    """Implements Batcher and AdapterHost: `step` only fetches what the thread has made since the last call."""

    def __init__(self, batcher: SimulatedBatcher) -> None:
        self._batcher = batcher
        """The thread's, but for `info`."""
        self.info: ModelInfo = batcher.info
        self.num_free_blocks = batcher.num_free_blocks
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._orders: list[StartRequest | list[int]] = []
        self._made = BatcherOutput()
        self._failure: Exception | None = None
        self._closed = False
        self.wakeup: int | None
        self.wakeup, self._bell = os.pipe()
        self._reader = self.wakeup
        os.set_blocking(self._reader, False)
        self._rung = False
        self._thread = threading.Thread(target=self._run, name="simulated-engine", daemon=True)
        self._thread.start()

    def start(self, request: StartRequest) -> None:
        self._order(request)

    def abort(self, ids: Sequence[int]) -> None:
        self._order(list(ids))

    def _order(self, order: StartRequest | list[int]) -> None:
        with self._changed:
            self._orders.append(order)
            self._changed.notify()

    def step(self) -> BatcherOutput:
        with self._changed:
            if self._rung:
                os.read(self._reader, 1)
                self._rung = False
            if self._failure is not None:
                raise RuntimeError("the engine's thread has ended") from self._failure
            made, self._made = self._made, BatcherOutput()
        return made

    def _run(self) -> None:
        try:
            while self._carry_out(self._next_orders()):
                self._add(self._batcher.step())
        except Exception as error:
            with self._changed:
                self._failure = error
                self._ring()

    def _next_orders(self) -> list[StartRequest | list[int]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._orders or self._batcher.has_work)
            if self._closed:
                return None
            orders, self._orders = self._orders, []
            return orders

    def _carry_out(self, orders: list[StartRequest | list[int]] | None) -> bool:
        for order in orders or ():
            if isinstance(order, StartRequest):
                self._batcher.start(order)
            else:
                self._batcher.abort(order)
        return orders is not None

    def _add(self, new: BatcherOutput) -> None:
        with self._changed:
            self.num_free_blocks = self._batcher.num_free_blocks
            self._made.tokens += new.tokens
            self._made.released += new.released
            self._made.num_scheduled_tokens += new.num_scheduled_tokens
            self._made.num_preemptions += new.num_preemptions
            if new.tokens or new.released:
                self._ring()

    def _ring(self) -> None:
        if not self._rung:
            os.write(self._bell, b"!")
            self._rung = True

    def load_adapter(self, key: str, folder: Path) -> None:
        self._batcher.load_adapter(key, folder)

    def unload_adapter(self, key: str) -> None:
        self._batcher.unload_adapter(key)

    def close(self) -> None:
        if self._closed:
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._batcher.close()
        os.close(self._reader)
        os.close(self._bell)
