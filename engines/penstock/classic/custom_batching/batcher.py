"""The dynamic batcher of a model with custom batching: a batch is what both of them allow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic_ns

from penstock.classic.batcher import DynamicBatcher
from penstock.classic.call import Call
from penstock.classic.custom_batching.request import waiting_request
from penstock.classic.custom_batching.strategy import Strategy, StrategyError
from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import PenstockError

logger = logging.getLogger(__name__)

SLOW_NS = 50_000_000
"""The strategy runs on the server's event loop, where everything waits for it."""
_WARN_INTERVAL_NS = 60_000_000_000


class CustomBatcher(DynamicBatcher[Call]):
    def __init__(self, config: ModelConfig, strategy: Strategy, fail: Callable[[Call, PenstockError], None]) -> None:
        """`fail` ends a request for which the strategy has raised, and takes it out of the queue."""
        super().__init__(config)
        self._joins = self._ask
        self._strategy = strategy
        self._fail = fail
        self._failed: list[tuple[Call, StrategyError]] = []
        self._model = config.name
        self._warned_ns = -_WARN_INTERVAL_NS

    def add(self, item: Call, now_ns: int) -> None:
        super().add(item, now_ns)  # first: a request that finds the queue full is not looked at
        item.waiting = waiting_request(item.request, item.size)

    def _next_batch(self, now_ns: int) -> list[Call]:
        started = monotonic_ns()
        self._strategy.begin()
        batch = super()._next_batch(now_ns)
        self._strategy.end()
        self._warn_if_slow(monotonic_ns() - started)
        if self._failed:
            self._fail_those()
        return batch

    def _fail_those(self) -> None:
        failed, self._failed = self._failed, []
        cause = failed[0][1].__cause__
        logger.error(
            "the custom batching of model '%s' failed for %d requests", self._model, len(failed), exc_info=cause
        )
        for call, error in failed:
            self._fail(call, error)

    def _ask(self, item: Call) -> bool | None:
        try:
            return self._strategy.joins(item.waiting)
        except StrategyError as error:
            self._failed.append((item, error))
            return None

    def _warn_if_slow(self, spent_ns: int) -> None:
        now = monotonic_ns()
        if spent_ns > SLOW_NS and now - self._warned_ns >= _WARN_INTERVAL_NS:
            self._warned_ns = now
            logger.warning(
                "the custom batching of model '%s' took %d ms for a batch, and held up the whole server",
                self._model,
                spent_ns // 1_000_000,
            )
