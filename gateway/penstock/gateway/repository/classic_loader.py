"""Loads classic models: through the backend plugins of the shim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock

from penstock.classic.base import Backend, InferModel, ModelContext
from penstock.classic.model import load_model
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_limits import has_rate_limits
from penstock.classic.rate_limiter import RateLimiter
from penstock.classic.registry import backend_names, find_backend
from penstock.gateway.repository.planning import Loader

logger = logging.getLogger("penstock")

_PYTHON = "python"


class ClassicLoader:
    def __init__(self, backend: Backend, limiter: RateLimiter | None = None) -> None:
        self._backend = backend
        self._limiter = limiter

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        self._backend.auto_complete(config, version_folder)

    async def load(self, context: ModelContext) -> InferModel:
        if self._limiter is None and has_rate_limits(context.config):
            logger.warning("model '%s' has rate limits, and the server has them off (--rate-limit)", context.name)
        return await load_model(context, self._backend, self._limiter)


def classic_loaders(
    options: Mapping[str, Mapping[str, str]], limiter: RateLimiter | None = None
) -> Callable[[str], Loader]:
    """Gives the loader for a backend's name, the same one for all its models. It raises ValueError for unknown names.

    `options` are RepositorySettings.backend_options; `limiter` is there where rate limits are applied.
    """

    found: dict[str, Loader] = {}
    lock = Lock()  # models are prepared in threads

    def loader(backend: str) -> Loader:
        with lock:
            if backend not in found:
                name = _PYTHON if _is_python_based(backend, options.get(_PYTHON, {})) else backend
                settings = {**options.get("", {}), **options.get(name, {})}
                found[backend] = ClassicLoader(find_backend(name)(settings), limiter)
            return found[backend]

    return loader


def _is_python_based(backend: str, options: Mapping[str, str]) -> bool:
    """Whether it is a program for the python backend, in the folder that its option names, and no plugin."""
    folder = options.get("backend-directory", "")
    return bool(folder) and backend not in backend_names() and (Path(folder) / backend / "model.py").is_file()
