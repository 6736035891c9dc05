"""Loads classic models: through the backend plugins of the shim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock

from penstock.engines.classic.base import Backend, InferModel, ModelContext
from penstock.engines.classic.model import load_model
from penstock.engines.classic.model_config import ModelConfig
from penstock.engines.classic.registry import find_backend
from penstock.gateway.repository.loading import Loader


class ClassicLoader:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        self._backend.auto_complete(config, version_folder)

    async def load(self, context: ModelContext) -> InferModel:
        return await load_model(context, self._backend)


def classic_loaders(options: Mapping[str, Mapping[str, str]]) -> Callable[[str], Loader]:
    """Gives the loader for a backend's name, the same one for all its models. It raises ValueError for unknown names.

    `options` are RepositorySettings.backend_options.
    """

    found: dict[str, Loader] = {}
    lock = Lock()  # models are prepared in threads

    def loader(backend: str) -> Loader:
        with lock:
            if backend not in found:
                settings = {**options.get("", {}), **options.get(backend, {})}
                found[backend] = ClassicLoader(find_backend(backend)(settings))
            return found[backend]

    return loader
