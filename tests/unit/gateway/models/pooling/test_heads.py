"""What logits mean, by a model's config.json."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.engines.errors import UnsupportedError
from penstock.gateway.models.pooling.model import read_head

LOGITS = np.array([[2.0, -1.0], [-500.0, 500.0]], np.float32)
SIGMOID = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))
SOFTMAX = np.array([[np.exp(3), 1], [0, 1 + np.exp(3)]]) / (1 + np.exp(3))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, SOFTMAX),
        ({"problem_type": "single_label_classification"}, SOFTMAX),
        ({"problem_type": "multi_label_classification"}, SIGMOID),
        ({"problem_type": "regression"}, LOGITS),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, LOGITS),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, SIGMOID),
        ({"sentence_transformers": {"version": "5"}, "problem_type": "regression"}, LOGITS),
    ],
)
def test_the_activation_is_what_the_model_s_settings_say(settings: dict[str, Any], wanted: Any) -> None:
    with np.errstate(all="raise", under="ignore"):
        assert np.allclose(read_head(settings, 2).activate(LOGITS), wanted, atol=1e-6)


def test_a_single_label_is_a_probability() -> None:
    assert np.allclose(read_head({}, 1).activate(LOGITS[:1, :1]), SIGMOID[:1, :1])


def test_an_activation_that_is_not_known() -> None:
    with pytest.raises(UnsupportedError, match="Tanh; supported are Sigmoid"):
        read_head({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, 1)


def test_labels_that_are_missing_are_numbered() -> None:
    assert read_head({"id2label": {"1": "bad", "0": "good"}}, 3).labels == ("good", "bad", "LABEL_2")
    assert read_head({"id2label": None}, 1).labels == ("LABEL_0",)
