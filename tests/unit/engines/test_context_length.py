"""The longest context, as models' makers write it down, for every engine and for the memory that is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.model_settings import context_length
from penstock.engines.openvino.families import parse_config
from penstock.gateway.models.memory.model_size import read_shape
from support.models import SHAPE

QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GEMMA3 = {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "linear", "factor": 8.0}}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "longest", "more", "wanted"),
    [
        (QWEN, 32768, {}, 131072),
        (QWEN, 40960, {}, 131072),
        (QWEN, 131072, {}, 131072),
        (DEEPSEEK, 163840, {}, 163840),
        ({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 131072, {}, 131072),
        ({"type": "yarn", "factor": 4}, 2048, {}, 8192),
        ({"type": "yarn", "factor": 1.5}, 1000, {"original_max_position_embeddings": 900}, 1350),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 1024}, 4096, {}, 4096),
        ({"type": "yarn", "factor": 0.5}, 2048, {}, 2048),
        ({"type": "linear", "factor": 4.0}, 4096, {}, 16384),
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, {}, 16384),
        ({"rope_type": "linear", "factor": 8.0}, 131072, {"model_type": "gemma3_text"}, 131072),
        ({"rope_type": "linear", "factor": 8.0}, 131072, {"architectures": ["Gemma3ForCausalLM"]}, 131072),
        (GEMMA3, 131072, {"model_type": "gemma3_text"}, 131072),
        ({"full_attention": {**QWEN, "factor": 8}, "sliding_attention": {"rope_type": "default"}}, 65536, {}, 262144),
        ({**LLAMA3, "original_max_position_embeddings": 8192}, 131072, {}, 131072),
        ({"type": "dynamic", "factor": 4.0}, 4096, {}, 4096),
        ({**LONGROPE, "original_max_position_embeddings": 4096}, 131072, {}, 4096),
        (LONGROPE, 131072, {"original_max_position_embeddings": 4096}, 4096),
        ({"type": "su"}, 131072, {"original_max_position_embeddings": 4096}, 4096),
        ({"rope_type": "default", "rope_theta": 1e6}, 2048, {}, 2048),
        ({}, 2048, {}, 2048),
    ],
)
def test_scaled_rotations_lengthen_it_and_are_not_counted_twice(
    key: str, rope: dict[str, Any], longest: int, more: dict[str, Any], wanted: int
) -> None:
    assert context_length({"max_position_embeddings": longest, key: rope, **more}) == wanted


def test_longrope_serves_its_long_context_when_that_is_chosen() -> None:
    config = {"max_position_embeddings": 131072, "rope_scaling": LONGROPE | {"original_max_position_embeddings": 4096}}
    assert [context_length(config, chosen) for chosen in (None, 4096, 4097)] == [4096, 4096, 131072]


def test_no_context_is_named() -> None:
    assert context_length({"rope_scaling": QWEN}) is None


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "yarn", "factor": "4"}, "RoPE factor of 4, which is not a valid factor"),
        ({"type": "linear", "factor": -1}, "RoPE factor of -1"),
        ({"type": "linear", "factor": True}, "RoPE factor of True"),
        ({"type": "yarn", "factor": float("inf")}, "RoPE factor of inf"),
        ({"type": "yarn", "factor": float("nan")}, "RoPE factor of nan"),
        ({"type": "yarn", "factor": 1e6}, "make a context of 2048000000 tokens"),
        (
            {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1.5},
            "=1.5, which is not a number of tokens",
        ),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 1 << 60}, "which is not a number of tokens"),
        ({"type": "longrope"}, "'longrope' needs 'original_max_position_embeddings'"),
    ],
)
def test_settings_that_say_nothing_sensible(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        context_length({"max_position_embeddings": 2048, "rope_scaling": rope})


@pytest.mark.parametrize("rope", [{"type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 4.0}])
def test_the_graph_and_the_planned_memory_agree(rope: dict[str, Any], tmp_path: Path) -> None:
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert shape is not None
    assert parse_config(config).max_position_embeddings == shape.max_len == 4 * SHAPE["max_position_embeddings"]


def test_learned_positions_are_not_stretched() -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_positions": 512, "rope_scaling": {"type": "yarn", "factor": 4}}
    config |= {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 384}
    assert parse_config(config).max_position_embeddings == 512
