"""What holds for every runner driven by hand: whatever a step mixes, the tokens are those of each request alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_models import reference_tokens
from helpers_runner import Driver, prompt
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.torch.config import TorchConfig
from penstock.engines.torch.runner import TorchRunner


@pytest.fixture(params=["openvino", "torch"])
def runner(request: pytest.FixtureRequest, llama_dir: Path) -> Any:
    settings: dict[str, Any] = {"dtype": "f32", "threads": 1, "num_blocks": 64, "max_num_seqs": 8}
    made: ModelRunner
    if request.param == "openvino":
        made = OpenVINORunner(OpenVINOConfig(llama_dir, **settings))
    else:
        made = TorchRunner(TorchConfig(llama_dir, device="cpu", **settings))
    yield made
    made.close()


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
