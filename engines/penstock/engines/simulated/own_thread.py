"""A simulated engine that runs by itself, as TensorRT-LLM does: in a thread, with a file descriptor that says when."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from penstock.engines.autonomous.output_pipe import OutputPipe
from penstock.engines.contract.continuous_batcher import BatcherOutput, StartRequest
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import UnsupportedError
from penstock.engines.simulated.batcher import SimulatedBatcher


class OwnThread:
    """Implements ContinuousBatcher and AdapterHost: `step` only fetches what the thread made since the last."""

    def __init__(self, batcher: SimulatedBatcher) -> None:
        self._batcher = batcher
        """The thread's, but for `info`."""
        self.info: ModelInfo = batcher.info
        self.num_free_blocks = batcher.num_free_blocks
        self._changed = threading.Condition()
        """Guards the orders and `_closed`."""
        self._orders: list[StartRequest | list[int]] = []
        self._closed = False
        self._pipe = OutputPipe()
        self.wakeup: int | None = self._pipe.wakeup
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
        return self._pipe.fetch()

    def _run(self) -> None:
        try:
            while self._carry_out(self._next_orders()):
                output = self._batcher.step()
                # first the blocks: the reader that is woken looks how many there are
                self.num_free_blocks = self._batcher.num_free_blocks
                self._pipe.put(output)
        except Exception as error:
            self._pipe.fail(error)

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

    def reset_prefix_cache(self) -> None:
        """As TensorRT-LLM."""
        raise UnsupportedError("This engine cannot empty its prefix cache.")

    def prepare_adapter(self, key: str, folder: Path) -> Path:
        return self._batcher.prepare_adapter(key, folder)

    def install_adapter(self, key: str, prepared: Path) -> None:
        self._batcher.install_adapter(key, prepared)

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
        self._pipe.close()
