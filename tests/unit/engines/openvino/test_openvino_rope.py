"""Frequencies and attention factors are those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
def test_scaling(settings: dict[str, Any], head_dim: int) -> None:
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


def test_default() -> None:
    frequencies = parse_rope({"rope_theta": 100.0}, 4).inv_freq
    np.testing.assert_allclose(frequencies, [1.0, 0.1], rtol=1e-6)
    assert (
        parse_rope({"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}, 4).inv_freq == frequencies
    ).all()
    assert parse_rope({}, 8).inv_freq[1] == pytest.approx(0.1)
