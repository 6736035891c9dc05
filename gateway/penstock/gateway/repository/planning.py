"""From a model's folder to a configuration that is complete and checked. Everything here blocks: call it in threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.model_config import ModelConfig
from penstock.gateway.kserve.classification import read_labels
from penstock.gateway.repository.batch_checks import check_strategy
from penstock.gateway.repository.config_file import read_config
from penstock.gateway.repository.defaults import complete
from penstock.gateway.repository.settings import RepositorySettings
from penstock.gateway.repository.supported import check_supported


class Completer(Protocol):
    """What of a backend completes configurations."""

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """Fills in, in place, what the configuration leaves out. In a thread. Raises ValueError, PenstockError."""
        ...


class Loader(Completer, Protocol):
    """Loads the models of one backend."""

    async def load(self, context: ModelContext) -> InferModel:
        """A version that is ready. When cancelled it leaves nothing behind. Raises ValueError, PenstockError."""
        ...


class Loaders(Protocol):
    def __call__(self, backend: str, folder: Path | None = None) -> Loader:
        """The loader for a backend's name; `folder` is the model's, which may have a backend of its own. In a thread.

        Raises ValueError for unknown names.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model whose configuration is supported as far as it is written."""

    folder: Path
    config: ModelConfig


def plan_model(settings: RepositorySettings, name: str, folder: Path, override: str | None = None) -> ModelPlan:
    """`override` is a load request's configuration. Raises ValueError, PenstockError."""
    config = read_config(folder, name, override=override, config_name=settings.config_name)
    complete(config, name, folder, gpus=settings.gpus)
    check_supported(config, complete=False)
    for output in config.output:
        if output.label_filename:
            read_labels(folder, output.label_filename)
    return ModelPlan(folder, config)


def version_config(
    settings: RepositorySettings, plan: ModelPlan, version: int, backend: Completer | None
) -> ModelConfig:
    """The configuration of one version, with what its backend fills in; ensembles have none.

    Raises ValueError, PenstockError.
    """
    config = ModelConfig()
    config.CopyFrom(plan.config)
    if settings.auto_complete and backend is not None:
        backend.auto_complete(config, plan.folder / str(version))
        complete(config, config.name, plan.folder, gpus=settings.gpus)
    check_supported(config)
    check_strategy(config, plan.folder, plan.folder / str(version))
    return config
