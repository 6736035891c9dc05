"""A tiny model for the tests that run one. Other tests do not import torch and transformers, which make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models import make_model

    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def llama_reference(llama_dir: Path) -> Any:
    from support.models import load_reference

    return load_reference(llama_dir)
