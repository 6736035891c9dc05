from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner

MakeRunner = Callable[..., OpenVINORunner]


@pytest.fixture
def make_runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runners in f32 on one thread, closed after the test. No huge pages: they would copy all that the process has."""
    monkeypatch.setattr("penstock.engines.openvino.runner.collapse_filled_memory", lambda seconds: None)
    made: list[OpenVINORunner] = []

    def make(model_dir: Path, **settings: Any) -> OpenVINORunner:
        defaults = {"dtype": "f32", "threads": 1, "num_blocks": 128, "max_num_seqs": 8}
        runner = OpenVINORunner(OpenVINOConfig(model_dir, **{**defaults, **settings}))
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.close()
