from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.torch.config import TorchConfig
from penstock.engines.torch.runner import TorchRunner

MakeRunner = Callable[..., TorchRunner]


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
