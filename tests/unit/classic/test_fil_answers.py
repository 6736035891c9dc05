"""What the fil backend makes of a forest's scores, and of its parameters. No library is needed for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.classic.fil.backend import Answers
from penstock.classic.fil.forest import FilSettings, read_settings
from penstock.classic.tensors import Array
from support.backends import model_config


class Forest:
    """Its scores are the rows themselves."""

    explains = False

    def __init__(self, outputs: int) -> None:
        self.features = outputs

    def scores(self, rows: Array) -> Array:
        return rows

    def contributions(self, rows: Array) -> Array:
        raise NotImplementedError


def settings(**parameters: str) -> FilSettings:
    folder = Path(__file__).parent
    texts = (f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items())
    text = 'parameters { key: "model_type" value { string_value: "lightgbm" } }' + " ".join(texts)
    return read_settings(model_config(text, default_model_filename="test_fil_answers.py"), folder)


def answers(scores: list[list[float]], width: int = 1, **parameters: str) -> list[list[float]]:
    rows = np.array(scores, np.float32)
    found = Answers(Forest(rows.shape[1]), settings(**parameters))
    wide = found.width(width)
    answered = found.of(rows, wide)
    assert answered.dtype == np.float32
    assert answered.shape == (len(rows), wide)
    return answered.tolist()


def test_scores_are_answered_as_they_are() -> None:
    assert answers([[0.25], [4.0]]) == [[0.25], [4.0]]
    assert answers([[0.25, 0.5, 0.25]]) == [[0.25, 0.5, 0.25]]


def test_the_class_is_the_likeliest_or_what_is_above_the_threshold() -> None:
    assert answers([[0.25, 0.5, 0.25], [0.75, 0.0, 0.25]], output_class="true") == [[1], [0]]
    assert answers([[0.25], [0.5], [0.75]], output_class="true") == [[0], [0], [1]]
    assert answers([[0.25], [0.5], [0.75]], is_classifier="true", threshold="0.25") == [[0], [1], [1]]


def test_a_binary_classifier_has_one_probability_or_two() -> None:
    assert answers([[0.25], [1.0]], predict_proba="true", output_class="true") == [[0.25], [1]]
    assert answers([[0.25], [1.0]], 2, predict_proba="true") == [[0.75, 0.25], [0, 1]]
    assert answers([[0.25, 0.75]], 2, predict_proba="true", output_class="true") == [[0.25, 0.75]]


@pytest.mark.parametrize(
    "parameter",
    [
        {"model_type": "catboost"},
        {"threshold": "half"},
        {"threshold": "nan"},
        {"predict_proba": "maybe"},
        {"storage_type": "THICK"},
        {"algo": "FAST"},
        {"blocks_per_sm": "-1"},
        {"cpu_nthread": "many"},
    ],
)
def test_what_cannot_be_is_named(parameter: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(parameter))):
        settings(**parameter)


def test_the_file_tells_the_type_if_it_is_the_only_one(tmp_path: Path) -> None:
    for name, model_type in (("xgboost.ubj", "xgboost_ubj"), ("checkpoint.tl", "treelite_checkpoint")):
        (tmp_path / name).touch()
        assert read_settings(model_config(), tmp_path).model_type == model_type
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match="model_type"):
        read_settings(model_config(), tmp_path)
    named = 'parameters { key: "model_type" value { string_value: "lightgbm" } }'
    with pytest.raises(ValueError, match=r"unable to find '.*/model\.txt'"):
        read_settings(model_config(named), tmp_path)
