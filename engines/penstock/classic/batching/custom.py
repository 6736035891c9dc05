"""Custom batching: a class in a model's batchstrategy.py says which requests share a batch, in the place of Triton's
batchstrategy.so.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from types import MappingProxyType
from typing import Any

from penstock.classic.base import ModelContext
from penstock.classic.batching.batch import QueuedCall
from penstock.classic.batching.queue import DynamicBatcher
from penstock.classic.messages import InferRequest, InputInfo, WaitingRequest
from penstock.classic.model_config import ModelConfig, config_dict
from penstock.classic.model_files import check_file_name, run_file
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError, UnsupportedError

logger = logging.getLogger(__name__)

FILENAME = "batchstrategy.py"
LIBRARY = "batchstrategy.so"
PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
"""Triton's. Here it names a Python file, from the model's folder."""
_NO_LIBRARY = (
    "model '{model}' has a library for custom batching ({library}), which is not loaded here: write its rules in"
    f" Python, in a file {FILENAME} in the model's folder (docs/batching.md#custom-batching)"
)


def find_strategy(config: ModelConfig, model_folder: Path, version_folder: Path) -> Path | None:
    """The file, or None for a model that has none. As in Triton, the version's folder is looked at first.

    A batchstrategy.py stands for a library that the parameter names, so that one repository serves both servers.

    Raises UnsupportedError for a library without such a file, InvalidRequestError for what makes no sense.
    """
    named = str(config.parameters[PARAMETER].string_value) if PARAMETER in config.parameters else None
    if named is not None and config.HasField("sequence_batching"):
        raise InvalidRequestError(
            f"{PARAMETER} cannot be specified with sequence batcher, using default batching strategy"
        )
    if named is not None and not named.isprintable():
        raise InvalidRequestError(f"{PARAMETER} of {config.name} has unprintable characters")
    if named is not None and named.endswith(".py"):
        check_file_name(PARAMETER, named)
        path: Path | None = model_folder / named
        if not (model_folder / named).is_file():
            raise InvalidRequestError(f"{PARAMETER} of {config.name}: there is no file '{named}' in the model's folder")
    else:
        path = _first(FILENAME, version_folder, model_folder)
        library = named or _first(LIBRARY, version_folder, model_folder)
        # A library that is only there Triton asks about dynamic batches, and about nothing else.
        if path is None and (named is not None or (library and config.HasField("dynamic_batching"))):
            raise UnsupportedError(_NO_LIBRARY.format(model=config.name, library=named or LIBRARY), param="parameters")
    if path is not None and (not config.HasField("dynamic_batching") or config.max_batch_size < 1):
        raise InvalidRequestError(f"{path.name} needs dynamic_batching and max_batch_size for {config.name}")
    return path


def _first(name: str, *folders: Path) -> Path | None:
    return next((path for folder in folders if (path := folder / name).is_file()), None)


CLASS = "BatchStrategy"

_numbers = itertools.count(1)


class StrategyError(EngineError):
    """The strategy has raised."""


class CustomStrategy:
    """Forms one batch after the other: `begin`, `joins` for each request in the order of the queue, `end`.

    Whatever the class raises, sys.exit() included, the server has to live on.
    """

    def __init__(self, strategy: Any, model: str, module: str) -> None:
        """Raises TypeError for an object that cannot say what joins."""
        self._include = getattr(strategy, "include", None)
        if not callable(self._include):
            raise TypeError(f"{CLASS} has no method include")
        self._start = getattr(strategy, "start", None)
        self._finish = getattr(strategy, "finish", None)
        self._close = getattr(strategy, "close", None)
        self._model = model
        self._module = module
        self._batch: Any = None
        self._started = False

    def begin(self) -> None:
        self._started = False

    def joins(self, request: WaitingRequest) -> bool:
        """Whether the request joins the batch. Raises StrategyError."""
        try:
            if not self._started:
                self._batch = None if self._start is None else self._start()
                self._started = True
            return bool(self._include(self._batch, request))
        except BaseException as error:
            raise StrategyError(f"the custom batching of model '{self._model}' failed: {_message(error)}") from error

    def end(self) -> None:
        """The batch is formed. It may be dropped, and its requests asked about again."""
        batch, self._batch = self._batch, None
        if self._started and self._finish is not None:
            self._ending("finish", self._finish, batch)

    def close(self) -> None:
        """Once, when the model is unloaded. In a thread."""
        if self._close is not None:
            self._ending("close", self._close)
        sys.modules.pop(self._module, None)

    def _ending(self, name: str, method: Callable[..., object], *arguments: Any) -> None:
        try:
            method(*arguments)
        except BaseException:
            logger.exception("%s() of the custom batching of model '%s' failed", name, self._model)


def load_strategy(context: ModelContext) -> CustomStrategy | None:
    """That of the model's folder, None if there is none. In a thread.

    Raises ValueError or PenstockError when it cannot be loaded.
    """
    config = context.config
    path = find_strategy(config, context.model_folder, context.version_folder)
    if path is None:
        return None
    name = f"_penstock_batchstrategy_{next(_numbers)}"
    try:
        strategy = CustomStrategy(_class(path, name)(config_dict(config)), config.name, name)
    except BaseException as error:
        sys.modules.pop(name, None)
        logger.exception("%s of model '%s' cannot be loaded", path.name, config.name)
        raise ValueError(f"{path.name} of model '{config.name}' cannot be loaded: {_message(error)}") from error
    logger.info("model '%s' has custom batching (%s)", config.name, path.name)
    return strategy


def _class(path: Path, name: str) -> Any:
    module = run_file(path, name)
    try:
        return getattr(module, CLASS)
    except AttributeError:
        raise TypeError(f"it has no class {CLASS}") from None


def _message(error: BaseException) -> str:
    """What callers are told of it: nothing that names files of the server, and no more than a line's length."""
    try:
        text = error.strerror or "" if isinstance(error, OSError) else str(error)
    except Exception:
        text = "it cannot be shown"
    return f"{type(error).__name__}: {text}"[:300]


SLOW_NS = 50_000_000
"""The strategy runs on the server's event loop, where everything waits for it."""
_WARN_INTERVAL_NS = 60_000_000_000


class CustomBatcher(DynamicBatcher[QueuedCall]):
    def __init__(
        self, config: ModelConfig, strategy: CustomStrategy, fail: Callable[[QueuedCall, PenstockError], None]
    ) -> None:
        """`fail` ends a request for which the strategy has raised, and takes it out of the queue."""
        super().__init__(config)
        self._joins = self._ask
        self._strategy = strategy
        self._fail = fail
        self._failed: list[tuple[QueuedCall, StrategyError]] = []
        self._model = config.name
        self._warned_ns = -_WARN_INTERVAL_NS

    def add(self, item: QueuedCall, now_ns: int) -> None:
        super().add(item, now_ns)  # first: a request that finds the queue full is not looked at
        item.waiting = waiting_request(item.request, item.size)

    def _next_batch(self, now_ns: int) -> list[QueuedCall]:
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

    def _ask(self, item: QueuedCall) -> bool | None:
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


def waiting_request(request: InferRequest, batch_size: int) -> WaitingRequest:
    return WaitingRequest(
        batch_size=batch_size,
        inputs=MappingProxyType({name: _info(tensor) for name, tensor in request.inputs.items()}),
        parameters=MappingProxyType(request.parameters),
        id=request.id,
        priority=request.priority,
    )


def _info(tensor: Tensor) -> InputInfo:
    array = tensor.array
    strings = tensor.datatype == "BYTES"
    byte_size = 4 * array.size + sum(map(len, array.flat)) if strings else array.nbytes
    return InputInfo(tensor.datatype, array.shape, byte_size)
