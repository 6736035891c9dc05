"""What runs a model when nobody says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.language import engine_spec
from penstock.gateway.models.language.engine_spec import choose_engine
from penstock.gateway.models.language.models import find_model


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """`machine(gpus=..., torch=...)`: what there is."""

    def be(*, gpus: int = 0, torch: bool = True, vllm: bool = False) -> None:
        monkeypatch.setattr(engine_spec, "visible_gpus", lambda: gpus)
        there = {"torch": torch, "transformers": torch, "vllm": vllm}
        monkeypatch.setattr(engine_spec, "find_spec", lambda name: object() if there[name] else None)

    return be


@pytest.fixture
def exotic(tmp_path: Path) -> Path:
    """A model of an architecture that OpenVINO's runner does not have."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpt", "architectures": ["MptForCausalLM"]}))
    return tmp_path


DEMO = find_model(None).folder


def test_openvino_on_cpus(machine) -> None:
    machine()
    assert choose_engine(DEMO) == "openvino"
    machine(torch=False)
    assert choose_engine(DEMO) == "openvino"


def test_torch_for_what_openvino_lacks(machine, exotic: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine()
    with caplog.at_level("INFO", "penstock"):
        assert choose_engine(exotic) == "torch"
    assert "MptForCausalLM" in caplog.text


def test_what_to_install_is_told(machine, exotic: Path) -> None:
    machine(torch=False)
    with pytest.raises(ConfigError, match=r"penstock-server\[torch\]"):
        choose_engine(exotic)


def test_graphs_of_openvino_are_its_own_everywhere(machine, exotic: Path) -> None:
    (exotic / "openvino_model.xml").touch()
    machine(gpus=1, vllm=True)
    assert choose_engine(exotic) == "openvino"


def test_vllm_or_torch_on_gpus(machine) -> None:
    machine(gpus=1, vllm=True)
    assert choose_engine(DEMO) == "vllm"
    machine(gpus=0, vllm=True)
    assert choose_engine(DEMO) == "openvino"
    machine(gpus=1)
    assert choose_engine(DEMO) == "torch"
    machine(gpus=1, torch=False)
    assert choose_engine(DEMO) == "openvino"


def test_quantized_checkpoints_are_not_for_torch(machine, tmp_path: Path) -> None:
    settings = json.loads((DEMO / "config.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**settings, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    machine(gpus=1)
    assert choose_engine(tmp_path) == "openvino"
    machine(gpus=1, vllm=True)
    assert choose_engine(tmp_path) == "vllm"
    config.write_text(json.dumps({**settings, "quantization_config": {"quant_method": "aqlm"}}))
    machine()
    with pytest.raises(ConfigError, match=r"quant_method=aqlm, which is not supported.* vllm may"):
        choose_engine(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_config_that_cannot_be_read(machine, tmp_path: Path, text: str | None) -> None:
    machine()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        choose_engine(tmp_path)
