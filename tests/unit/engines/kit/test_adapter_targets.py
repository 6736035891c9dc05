"""The layers of adapters, by whatever names the model that they were trained with had."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.adapter_files import LowRank
from penstock.engines.formats.safetensors_file import StoredTensor
from penstock.engines.kit.adapter_slots import fitting_layers


class Layer(NamedTuple):
    inputs: int
    outputs: int


Q, HEAD = "model.layers.0.self_attn.q_proj", "lm_head"
TARGETS = {Q: Layer(8, 16), HEAD: Layer(8, 32)}


def low_rank(inputs: int = 8, outputs: int = 16) -> LowRank:
    a, b = (StoredTensor("F32", shape, np.zeros(0, np.uint8)) for shape in ((2, inputs), (outputs, 2)))
    return LowRank(a, b, 1.0)


@pytest.mark.parametrize(
    "path",
    [
        Q,
        "model.language_model.layers.0.self_attn.q_proj",
        "language_model.model.layers.0.self_attn.q_proj",
        "language_model.layers.0.self_attn.q_proj",
        "layers.0.self_attn.q_proj",
    ],
)
def test_layers_of_whole_models(path: str) -> None:
    layer = low_rank()
    assert fitting_layers({path: layer}, TARGETS) == {Q: layer}


def test_heads_of_whole_models() -> None:
    layer = low_rank(outputs=32)
    assert fitting_layers({"language_model.lm_head": layer}, TARGETS) == {HEAD: layer}


def test_names_of_the_model_itself_come_first() -> None:
    path = "model.language_model.layers.0.self_attn.q_proj"
    assert list(fitting_layers({path: low_rank()}, {path: Layer(8, 16)})) == [path]


@pytest.mark.parametrize("other", ["model.visual.blocks.0.attn.qkv", "vision_tower.layers.0.q_proj"])
def test_layers_that_no_text_goes_through_are_left_out(other: str) -> None:
    assert list(fitting_layers({other: low_rank(3, 4), Q: low_rank()}, TARGETS)) == [Q]
    with pytest.raises(InvalidRequestError, match="changes no layer of the language model"):
        fitting_layers({other: low_rank(3, 4)}, TARGETS)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"model.language_model.layers.7.self_attn.q_proj": low_rank()}, r"no linear layer model\.language_model\.l"),
        ({"model.language_model.layers.0.self_attn.q_proj": low_rank(9)}, "has 9 inputs and 16 outputs, the model's"),
        ({Q: low_rank(), "language_model.layers.0.self_attn.q_proj": low_rank()}, "twice, by different names"),
    ],
)
def test_layers_that_do_not_fit(layers: dict[str, LowRank], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        fitting_layers(layers, TARGETS)
