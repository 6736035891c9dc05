from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers_models import load_reference, make_model
from penstock.engines.torch.config import TorchConfig
from penstock.engines.torch.runner import TorchRunner

MakeRunner = Callable[..., TorchRunner]


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def llama_reference(llama_dir: Path) -> Any:
    return load_reference(llama_dir)


@pytest.fixture
def make_runner() -> Any:
    """Runners in f32 on one thread of the CPU, closed after the test."""
    made: list[TorchRunner] = []

    def make(model_dir: Path, **settings: Any) -> TorchRunner:
        defaults = {"dtype": "f32", "device": "cpu", "threads": 1, "num_blocks": 64, "max_num_seqs": 8}
        runner = TorchRunner(TorchConfig(model_dir, **{**defaults, **settings}))
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close()
