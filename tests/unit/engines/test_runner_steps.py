"""What holds for every runner driven by hand: whatever a step mixes, the tokens are those of each request alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.contract.runner import ModelRunner
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.torch.config import TorchConfig
from penstock.engines.torch.runner import TorchRunner
from support.engine import Driver as CoreDriver
from support.models import reference_tokens
from support.runner import Driver, prompt


@pytest.fixture(params=["openvino", "torch"])
def start(request: pytest.FixtureRequest) -> Any:
    """Starts a runner on a model's folder; it is closed after the test."""
    settings: dict[str, Any] = {"dtype": "f32", "threads": 1, "num_blocks": 64, "max_num_seqs": 8}
    started: list[ModelRunner] = []

    def start_on(folder: Path) -> ModelRunner:
        if request.param == "openvino":
            started.append(OpenVINORunner(OpenVINOConfig(folder, **settings)))
        else:
            started.append(TorchRunner(TorchConfig(folder, device="cpu", **settings)))
        return started[-1]

    yield start_on
    for runner in started:
        runner.close()


@pytest.fixture
def runner(start: Any, llama_dir: Path) -> Any:
    return start(llama_dir)


def test_mixed_prefill_and_decode(runner: ModelRunner, llama_reference: Any) -> None:
    driver = Driver(runner)
    first, second, third = prompt(40, 2), prompt(77, 3), prompt(5, 4)
    a = driver.add(10, first)
    driver.step()
    b = driver.add(11, second)
    driver.step({11: 50, 10: 1})
    c = driver.add(12, third)
    driver.step({10: 1, 12: 5, 11: 20})
    driver.step({12: 1, 11: 7})
    for _ in range(8):
        driver.step()
    for request, tokens in ((a, first), (b, second), (c, third)):
        assert request.output == reference_tokens(llama_reference, tokens, len(request.output))
        assert len(request.output) >= 9


def test_an_end_of_sequence_that_the_vocabulary_does_not_have(start: Any, llama_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_dir, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 50_256]}))
    runner = start(folder)
    assert runner.info.eos_token_ids == (2,)
    driver = CoreDriver(runner, max_num_seqs=8)
    [request_id] = driver.add(prompt(5, 4), 3, min_tokens=2, ignore_eos=False)
    driver.run()
    assert driver.ends[request_id].error is None
