"""The class BatchStrategy of a model's batchstrategy.py: loading it, and asking it safely."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType
from typing import Any

from penstock.classic.base import ModelContext
from penstock.classic.custom_batching.files import find_strategy
from penstock.classic.custom_batching.request import WaitingRequest
from penstock.classic.model_config import config_dict
from penstock.engines.errors import EngineError

logger = logging.getLogger(__name__)

CLASS = "BatchStrategy"

_numbers = itertools.count(1)


class StrategyError(EngineError):
    """The strategy has raised."""


class Strategy:
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
            raise StrategyError(f"the custom batching of model '{self._model}' failed: {_told(error)}") from error

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


def load_strategy(context: ModelContext) -> Strategy | None:
    """That of the model's folder, None if there is none. In a thread.

    Raises ValueError or PenstockError when it cannot be loaded.
    """
    config = context.config
    path = find_strategy(config, context.model_folder, context.version_folder)
    if path is None:
        return None
    name = f"_penstock_batchstrategy_{next(_numbers)}"
    try:
        strategy = Strategy(_class(path, name)(config_dict(config)), config.name, name)
    except BaseException as error:
        sys.modules.pop(name, None)
        logger.exception("%s of model '%s' cannot be loaded", path.name, config.name)
        raise ValueError(f"{path.name} of model '{config.name}' cannot be loaded: {_told(error)}") from error
    logger.info("model '%s' has custom batching (%s)", config.name, path.name)
    return strategy


def _class(path: Path, name: str) -> Any:
    module = module_from_spec(ModuleSpec(name, _Loader(name, str(path)), origin=str(path)))
    sys.modules[name] = module  # where dataclasses look for it
    _Loader(name, str(path)).exec_module(module)
    try:
        return getattr(module, CLASS)
    except AttributeError:
        raise TypeError(f"it has no class {CLASS}") from None


def _told(error: BaseException) -> str:
    """What callers are told of it: nothing that names files of the server, and no more than a line's length."""
    try:
        text = error.strerror or "" if isinstance(error, OSError) else str(error)
    except Exception:
        text = "it cannot be shown"
    return f"{type(error).__name__}: {text}"[:300]


class _Loader(SourceFileLoader):
    """Leaves no compiled file in the repository, and reads none."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code
