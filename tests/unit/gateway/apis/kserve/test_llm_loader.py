"""Language models of a repository: built from their own settings, one engine each, started or gone without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.errors import EngineError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.configuration.sections.other_models import EmbeddingsConfig
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.kserve.loader import LANGUAGE_BACKENDS, LanguageModelLoader, language_loaders
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.models.loader import LoadableModel, ModelLoader
from support.dataplane import Setup
from support.language_repository import context, write_trtllm, write_vllm


class Built(ModelLoader):
    """Its models are simulated, their settings are kept."""

    def __init__(self, folder: Path, plane: DataPlane) -> None:
        super().__init__(ModelBuilder(), plane.models, EmbeddingsConfig())
        self.plane = plane
        self.folder = folder
        self.settings: dict[str, ModelSettings] = {}
        self.refusal: Exception | None = None
        self.stopped: list[str] = []

    async def fetch(self, entry: LoadableModel) -> LoadedModel:
        [name] = entry.names
        self.settings[name] = entry.settings
        setup = Setup(self.folder / name, SchedulerConfig(), 64)
        setup.model.names = (name,)
        start, stop = setup.engine.start, setup.engine.stop

        async def started() -> None:
            if self.refusal is not None:
                raise self.refusal
            await start()

        async def stopped() -> None:
            self.stopped.append(name)
            await stop()

        setup.engine.start, setup.engine.stop = started, stopped  # type: ignore[method-assign]
        return setup.model


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path / "built", DataPlane())


def loaders(built: Built, **options: dict[str, str]) -> dict[str, LanguageModelLoader]:
    return language_loaders(ModelSettings(), built.plane, built.load, options)


async def test_models_of_all_backends_side_by_side(tmp_path: Path, built: Built) -> None:
    plane, by_backend = built.plane, loaders(built)
    assert tuple(by_backend) == LANGUAGE_BACKENDS
    contexts = [context(write_vllm(tmp_path, "a", "org/a")), context(write_trtllm(tmp_path, "b", "org/b"))]
    models = []
    for each in contexts:
        loader = by_backend[each.config.backend]
        loader.auto_complete(each.config, each.version_folder)
        models.append(await loader.load(each))
    assert [(name, own.model.engine, own.model.model) for name, own in built.settings.items()] == [
        ("a", "vllm", "org/a"),
        ("b", "tensorrt_llm", "org/b"),
    ]
    assert {model.name for model in plane.models.served()} == {"a", "b"}
    assert ["sampling_parameters" in model.signature.inputs for model in models] == [True, False]
    assert ["lora_name" in model.signature.inputs for model in models] == [False, True]
    for model in models:
        await model.stop()
    assert (plane.models.served(), built.stopped) == ([], ["a", "b"])


async def test_an_engine_that_does_not_start_leaves_nothing(tmp_path: Path, built: Built) -> None:
    built.refusal = EngineError("no GPU")
    plane = built.plane
    with pytest.raises(EngineError, match="no GPU"):
        await loaders(built)["vllm"].load(context(write_vllm(tmp_path, "a", "org/a")))
    assert (plane.models.served(), plane.models.loaded(), built.stopped) == ([], [], ["a"])


async def test_without_completion_the_configuration_itself_must_be_right(tmp_path: Path, built: Built) -> None:
    by_backend = loaders(built)
    other = 'input { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] }'
    with pytest.raises(ValueError, match="input 'prompt' is not one"):
        await by_backend["vllm"].load(context(write_vllm(tmp_path, "a", "org/a"), other))
    assert built.settings == {}
    model = await by_backend["tensorrtllm"].load(context(write_trtllm(tmp_path, "b", "org/b")))
    assert model.signature.decoupled
    await model.stop()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"vllm": {"engine": "llama"}}, "vllm,engine='llama' is none of"),
        ({"tensorrtllm": {"batch": "1"}}, "the backend tensorrtllm has no setting 'batch'"),
        ({"penstock": {"engine": "torch"}}, "the backend penstock has no setting 'engine'"),
    ],
)
def test_settings_of_backends(built: Built, options: dict[str, dict[str, str]], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        loaders(built, **options)
    loaders(built, **{"": {"default-max-batch-size": "4"}})
