from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_models import load_reference, make_model


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def llama_reference(llama_dir: Path) -> Any:
    return load_reference(llama_dir)
