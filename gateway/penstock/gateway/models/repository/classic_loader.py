"""Loaders of classic models, by the name of their backend: a plugin, a `backend.py`, or a folder of backends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Lock

from penstock.classic.base import Backend, InferModel, ModelContext
from penstock.classic.batching.rate_limiter import RateLimiter, has_rate_limits
from penstock.classic.classic_model import ClassicModel
from penstock.classic.loading import BACKEND_FILENAME, backend_names, find_backend, load_backend_file, load_model
from penstock.classic.model_config import ModelConfig
from penstock.engines.host.memory import taken_memory
from penstock.gateway.models.memory.budget import MemoryBudget, Reservation
from penstock.gateway.models.memory.classic_need import classic_need
from penstock.gateway.models.repository.loading import Loader

logger = logging.getLogger("penstock")

_PYTHON = "python"


class ClassicLoader:
    def __init__(
        self,
        backend: Backend,
        limiter: RateLimiter | None = None,
        budget: MemoryBudget | None = None,
        *,
        in_processes: bool = False,
    ) -> None:
        """`budget` is there where classic models are counted; `in_processes`: each instance is a process."""
        self._backend = backend
        self._limiter = limiter
        self._budget = budget
        self._in_processes = in_processes

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        self._backend.auto_complete(config, version_folder)

    async def load(self, context: ModelContext) -> InferModel:
        if self._limiter is None and has_rate_limits(context.config):
            logger.warning("model '%s' has rate limits, and the server has them off (--rate-limit)", context.name)
        if self._budget is None:
            return await load_model(context, self._backend, self._limiter)
        return await self._load_counted(context, self._budget)

    async def _load_counted(self, context: ModelContext, budget: MemoryBudget) -> InferModel:
        need = await asyncio.to_thread(classic_need, context, in_processes=self._in_processes)
        place = await budget.claim(context.name, need, lambda: None)
        try:
            model = await load_model(context, self._backend, self._limiter)
        except BaseException:
            budget.release(place)
            raise
        place.loading = False
        place.taken = partial(_taken, place, model)
        model.on_unloaded(partial(budget.release, place))
        return model


def _taken(place: Reservation, model: ClassicModel) -> int:
    """Of a model in this process, nothing else can tell."""
    pids = model.pids
    return sum(map(taken_memory, pids)) if pids else place.host.total


class FileLoader(ClassicLoader):
    """Of a backend that is a backend.py."""

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        _check_runtime(config)
        super().auto_complete(config, version_folder)

    async def load(self, context: ModelContext) -> InferModel:
        _check_runtime(context.config)
        return await super().load(context)


class ClassicLoaders:
    """Gives the loader for a backend's name: a plugin's, a file's in the model's own folder, or what the folder of
    `--backend-directory` has. Plugins and programs are made once for all their models, files for each load of a model:
    a reload takes in what has changed."""

    def __init__(
        self,
        options: Mapping[str, Mapping[str, str]],
        limiter: RateLimiter | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """`options` are RepositorySettings.backend_options; `limiter` is there where rate limits are applied, and
        `budget` where the memory of classic models is counted."""
        self._options = options
        self._limiter = limiter
        self._budget = budget
        directory = options.get(_PYTHON, {}).get("backend-directory", "")
        self._directory = Path(directory) if directory else None
        self._loaders: dict[str, Loader] = {}
        self._lock = Lock()  # models are prepared in threads

    def __call__(self, backend: str, folder: Path | None = None) -> Loader:
        """`folder` is the model's. Raises ValueError for unknown names, and for a file that cannot be loaded."""
        is_plugin = backend in backend_names()
        if not is_plugin and folder is not None and (folder / BACKEND_FILENAME).is_file():
            return self._of_file(folder / BACKEND_FILENAME, backend, f"model '{folder.name}'")
        if not is_plugin and self._has(backend, BACKEND_FILENAME):
            assert self._directory is not None
            return self._of_file(self._directory / backend / BACKEND_FILENAME, backend, f"the backend '{backend}'")
        with self._lock:
            if backend not in self._loaders:
                name = _PYTHON if not is_plugin and self._has(backend, "model.py") else backend
                implementation = find_backend(name)(self._settings(name))
                self._loaders[backend] = ClassicLoader(
                    implementation, self._limiter, self._budget, in_processes=name == _PYTHON
                )
            return self._loaders[backend]

    def _of_file(self, path: Path, backend: str, owner: str) -> Loader:
        with self._lock:
            kind = load_backend_file(path, owner)
        return FileLoader(kind(self._settings(backend)), self._limiter, self._budget)

    def _settings(self, backend: str) -> dict[str, str]:
        return {**self._options.get("", {}), **self._options.get(backend, {})}

    def _has(self, backend: str, filename: str) -> bool:
        """Whether the folder of `--backend-directory` has this file of a backend (`model.py`: for the python backend).

        A name that is a path would lead to files elsewhere, and load requests can bring names.
        """
        if self._directory is None or Path(backend).name != backend or not backend.isprintable() or len(backend) > 64:
            return False
        return (self._directory / backend / filename).is_file()


def _check_runtime(config: ModelConfig) -> None:
    if config.runtime not in ("", BACKEND_FILENAME):
        raise ValueError(
            f"model '{config.name}': its backend is a {BACKEND_FILENAME} and has no runtime '{config.runtime[:64]}'"
        )
