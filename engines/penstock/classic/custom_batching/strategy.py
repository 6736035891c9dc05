"""The class BatchStrategy of a model's batchstrategy.py: loading it, and asking it without believing it."""

from __future__ import annotations

import itertools
import logging
import sys
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

_Raised = (Exception, SystemExit)
"""What is caught: sys.exit() in such a file must not end the server."""


class StrategyError(EngineError):
    """The strategy has raised."""


class Strategy:
    """Forms one batch after the other: `begin`, `joins` for each request in the order of the queue, `end`."""

    def __init__(self, strategy: Any, model: str, module: str) -> None:
        self._strategy = strategy
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
                self._batch = self._strategy.start() if hasattr(self._strategy, "start") else None
                self._started = True
            return bool(self._strategy.include(self._batch, request))
        except _Raised as error:
            raise StrategyError(self._text(error)) from error

    def end(self) -> None:
        """The batch is formed. It may be dropped, and its requests asked about again."""
        batch, self._batch = self._batch, None
        if self._started and hasattr(self._strategy, "finish"):
            try:
                self._strategy.finish(batch)
            except _Raised:
                logger.exception("finish() of the custom batching of model '%s' failed", self._model)

    def close(self) -> None:
        """Once, when the model is unloaded. In a thread."""
        try:
            if hasattr(self._strategy, "close"):
                self._strategy.close()
        except _Raised:
            logger.exception("close() of the custom batching of model '%s' failed", self._model)
        finally:
            sys.modules.pop(self._module, None)

    def _text(self, error: BaseException) -> str:
        return f"the custom batching of model '{self._model}' failed: {type(error).__name__}: {error}"[:400]


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
        made = _class(path, name)(config_dict(config))
        if not callable(getattr(made, "include", None)):
            raise TypeError(f"{CLASS} has no method include")
    except _Raised as error:
        sys.modules.pop(name, None)
        logger.exception("%s of model '%s' cannot be loaded", path.name, config.name)
        text = f"{path.name} of model '{config.name}' cannot be loaded: {type(error).__name__}: {error}"
        raise ValueError(text[:400]) from error
    logger.info("model '%s' has custom batching (%s)", config.name, path.name)
    return Strategy(made, config.name, name)


def _class(path: Path, name: str) -> Any:
    module = module_from_spec(ModuleSpec(name, _Loader(name, str(path)), origin=str(path)))
    sys.modules[name] = module  # where dataclasses look for it
    _Loader(name, str(path)).exec_module(module)
    try:
        return getattr(module, CLASS)
    except AttributeError:
        raise TypeError(f"it has no class {CLASS}") from None


class _Loader(SourceFileLoader):
    """Leaves no compiled file in the repository, and reads none."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code
