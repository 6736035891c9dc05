"""Embedding models beside a language model: which of its settings they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.configuration.config import Config, overlay
from penstock.gateway.models.memory.budget import MemoryBudget
from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.gateway.server import served_models
from penstock.gateway.server.served_models import EmbeddingModels


def test_how_the_language_model_keeps_and_multiplies_its_weights_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed activations need weights in 8 or 4 bits, which those beside it do not get."""
    built: list[Config] = []
    monkeypatch.setattr(served_models, "find_model", lambda place: tmp_path)
    monkeypatch.setattr(served_models, "build_pooling_model", lambda config, *_: built.append(config))
    monkeypatch.setattr(EmbeddingModels, "add", lambda self, model: None)
    settings = {"weights": "int8", "activations": "mixed", "embedding_model": ("search=./folder",), "dtype": "auto"}
    plane: Any = None
    models: Any = None
    EmbeddingModels(overlay(Config(), settings), plane, models, MemoryBudget(), LoadingBoard())
    [config] = built
    assert (config.model.weights, config.model.activations) == ("auto", "auto")
