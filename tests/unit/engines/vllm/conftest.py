"""One small model on vLLM for the tests of this folder; they are skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from helpers_models import make_model
from penstock.engines.registry import BATCHERS, EngineSpec, load_runner

OPTIONS: dict[str, Any] = {
    "dtype": "f32",
    "num_blocks": 24,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


@pytest.fixture(scope="session")
def needs_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: .ci/vllm runs this in an environment of its own")


@pytest.fixture(scope="session")
def model_dir(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm"), "llama", hidden_size=128, head_dim=32)


@pytest.fixture(scope="session")
def runner(model_dir: Path) -> Any:
    runner = load_runner(EngineSpec(runner="vllm", options=OPTIONS | {"model_dir": str(model_dir)}))
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def batcher(model_dir: Path) -> Any:
    batcher = BATCHERS["vllm"](OPTIONS | {"model_dir": str(model_dir)})
    yield batcher
    batcher.close()


@pytest.fixture(params=["runner", "batcher"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)
