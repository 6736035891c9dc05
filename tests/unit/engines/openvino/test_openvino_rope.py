"""Frequencies and attention factors are those of transformers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.rope import parse_rope

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "rope_theta": 1e6}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        YARN,
        {**YARN, "attention_factor": 1.25},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        {**YARN, "beta_fast": 16, "beta_slow": 2},
        {**YARN, "truncate": False},
        {**YARN, "factor": 0.5},
    ],
)
def test_scaled_frequencies_are_those_of_transformers(settings: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=settings
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu")
    rope = parse_rope({"rope_parameters": settings, "max_position_embeddings": 32768}, head_dim)
    np.testing.assert_allclose(rope.inv_freq, wanted.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(factor)
    old_style = {key: value for key, value in settings.items() if key not in ("rope_theta", "rope_type")}
    old = parse_rope(
        {"rope_scaling": {"type": settings["rope_type"], **old_style}, "rope_theta": settings["rope_theta"]}, head_dim
    )
    assert (old.inv_freq == rope.inv_freq).all()


def test_unscaled_frequencies_follow_theta_alone() -> None:
    frequencies = parse_rope({"rope_theta": 100.0}, 4).inv_freq
    np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-6)
    assert (
        parse_rope({"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}, 4).inv_freq == frequencies
    ).all()
    assert parse_rope({}, 8).inv_freq[1] == pytest.approx(0.1)


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
        {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 3e5}, "sliding_attention": None}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}, "rope_theta": 2e6},
    ],
)
def test_layer_types_with_rotations_of_their_own(settings: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
    shape |= {"num_attention_heads": 4, "num_hidden_layers": 6}
    wanted = Gemma3RotaryEmbedding(Gemma3TextConfig(**shape, **copy.deepcopy(settings)))
    spec = parse_config({"architectures": ["Gemma3ForCausalLM"], **shape, **settings})
    for n, rope in enumerate(spec.ropes):
        frequencies = wanted.sliding_attention_inv_freq if n < 5 else wanted.full_attention_inv_freq
        np.testing.assert_allclose(rope.inv_freq, frequencies.numpy(), rtol=2e-6)
    assert len(set(spec.ropes)) == 2
