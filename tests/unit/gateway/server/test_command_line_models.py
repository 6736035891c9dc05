"""Models that the command line names: which there are, and when their names are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import EngineError, ModelNotFoundError, NotReadyError
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.configuration.sections.other_models import EmbeddingsConfig
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.models.loader import LoadableModel, ModelLoader
from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.gateway.server.composition.models import command_line_models


def entries(**settings: Any) -> list[tuple[tuple[str, ...], str | None]]:
    return [(entry.public_names, entry.task) for entry in command_line_models(load_config(settings, environ={}))]


def test_model_comes_first_then_embedding_models_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text("{}")
    beside = (str(tmp_path / "small"), "org/embedder", "search=org/other")
    pooling = [(("small",), "pool"), (("org/embedder",), "pool"), (("search",), "pool")]
    assert entries(model="org/chat", embedding_model=beside) == [(("org/chat",), None), *pooling]
    assert entries(model="org/chat", served_model_name=("a", "b")) == [(("a", "b"), None)]
    assert entries(embedding_model=beside) == pooling


def test_the_demo_model_stands_for_none() -> None:
    assert entries() == [(("penstock-demo",), None)]
    assert entries(model_repository=("/models",)) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"lora": ("a=/a",)}, "lora: there is no MODEL"), ({"kv_events": "tcp://*:5557"}, "kv-events: there is no MODEL")],
)
def test_settings_of_model_alone_need_one(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        entries(model_repository=("/models",), **settings)


class Loading:
    """A loader of simulated models."""

    def __init__(self) -> None:
        self.board = LoadingBoard()
        self.catalogue = Catalogue(self.board)
        self.loader = ModelLoader(ModelBuilder(board=self.board), self.catalogue, EmbeddingsConfig())

    def entry(self, **settings: Any) -> LoadableModel:
        return LoadableModel(load_config({"engine": "simulated"} | settings, environ={}).models)


def test_what_is_in_a_folder_is_built_at_once_and_what_is_not_is_announced() -> None:
    loading = Loading()
    assert isinstance(loading.loader.prepare(loading.entry()), LoadedModel)
    assert loading.loader.prepare(loading.entry(model="org/chat")) is None
    for name in ("penstock-demo", "org/chat"):
        with pytest.raises(NotReadyError, match="still loading"):
            loading.catalogue.first(name)
    with pytest.raises(ConfigError, match="model: there is no folder or file"):
        loading.loader.prepare(loading.entry(model="./nothing"))
    with pytest.raises(ConfigError, match="revision: only hub models have revisions"):
        loading.loader.prepare(loading.entry(revision="v1"))


async def test_a_start_that_fails_leaves_nothing_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading()
    model = await loading.loader.fetch(LoadableModel(ModelSettings(), ("chat",)))
    with pytest.raises(ModelNotFoundError):  # a model of a repository may still serve under its name
        loading.catalogue.first("chat")

    async def fail(self: LoadedModel) -> None:
        loading.board.announce(("chat",))
        raise EngineError("no memory")

    monkeypatch.setattr(LoadedModel, "start", fail)
    with pytest.raises(EngineError, match="no memory"):
        await loading.loader.start(model)
    assert loading.board.names() == []
