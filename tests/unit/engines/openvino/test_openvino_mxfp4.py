"""GPT-OSS as it is published, with experts in MXFP4: held as they are, by the tokens of transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.openvino.checkpoint import Checkpoint
from support.cpu import HAS_INT8, own_cache
from support.models import load_reference, make_model, reference_tokens
from support.quantized import Tensors, reference_of, write_mxfp4
from support.runner import Driver, prompt

COUNT = 24
EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    return write_mxfp4(make_model(folder / "floats", "gpt-oss"), folder / "model")


def test_what_the_tensors_stand_for(model: Path) -> None:
    """By transformers' own code."""
    stored = load_file(model / "model.safetensors")
    found = Checkpoint(model, scheme=parse_scheme(json.loads((model / "config.json").read_text())))
    for part in ("gate_up_proj", "down_proj"):
        packed = (stored[f"{EXPERTS}{part}_{kind}"] for kind in ("blocks", "scales"))
        wanted = convert_moe_packed_tensors(*packed, dtype=torch.float32).numpy()
        for expert, values in enumerate(wanted):
            tensor = found[f"{EXPERTS}{expert}.{part}.weight"]
            np.testing.assert_array_equal(tensor.f32(), values.T)
            np.testing.assert_array_equal(tensor.rows_f32(5, 11), values.T[5:11])


@pytest.mark.parametrize("weights", ["auto", "f32"])
def test_tokens_are_those_of_the_checkpoint_in_floats(
    weights: str, model: Path, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reference, prompts = load_reference(reference_of(model)), [prompt(length, length) for length in (1, 45, 70)]
    wanted = [reference_tokens(reference, tokens, COUNT) for tokens in prompts]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "the model says the same whatever the prompt"
    with caplog.at_level(logging.INFO):
        runner = make_runner(model, weights=weights)
    assert Driver(runner).generate(prompts, COUNT) == wanted
    assert ("24 matrices of the quantized checkpoint have 4-bit floats" in caplog.text) == (weights == "f32")


@pytest.mark.parametrize(("weights", "again"), [("auto", []), ("int4", []), ("int8", ["int8"])])
def test_experts_are_quantized_again_for_int8_alone(
    weights: str, again: list[str], model: Path, make_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = make_runner(model, weights=weights)
    assert [line.split()[-1] for line in caplog.messages if "4-bit floats" in line] == again
    assert ("activations int8" in runner.info.runner) == (weights != "auto" and HAS_INT8)
    [tokens] = Driver(runner).generate([prompt(45, 1)], 4)
    assert len(tokens) == 4


def cut(tensors: Tensors) -> None:
    tensors[EXPERTS + "down_proj_scales"] = tensors[EXPERTS + "down_proj_scales"][:, :-1].clone()


def without_scales(tensors: Tensors) -> None:
    del tensors[EXPERTS + "down_proj_scales"]


def no_number(tensors: Tensors) -> None:
    tensors[EXPERTS + "down_proj_scales"][1, 5, 0] = 255


def halved(tensors: Tensors) -> None:
    tensors[EXPERTS + "down_proj_blocks"] = tensors[EXPERTS + "down_proj_blocks"][..., :8].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"experts\.0\.down_proj\.scales has shape \(63, 3\), which should be \(64, 3\)"),
        (without_scales, r"experts\.0\.down_proj has no tensor scales"),
        (no_number, "scales of quantized weights that are not finite"),
        (halved, r"blocks has shape \(64, 3, 8\), which should end in 16"),
    ],
)
def test_damaged_files(
    change: Callable[[Tensors], None], message: str, model: Path, tmp_path: Path, make_runner: Any
) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises((EngineError, UnsupportedError), match=message):
        make_runner(tmp_path)
