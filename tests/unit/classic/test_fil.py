"""The fil backend: its answers are those of the libraries that trained the models."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import BackendInstance
from penstock.classic.fil.backend import FilBackend
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensors import Array
from support.backends import load, model_config, run

xgboost = pytest.importorskip("xgboost")
lightgbm = pytest.importorskip("lightgbm")
treelite = pytest.importorskip("treelite")

FEATURES = 5
ROWS = np.random.default_rng(0).random((400, FEATURES), np.float32)
ROWS[np.random.default_rng(1).random(ROWS.shape) < 0.1] = np.nan
KNOWN = np.nan_to_num(ROWS)
TARGETS = {"regression": KNOWN.sum(1), "binary": (KNOWN[:, 0] > 0.5) * 1, "multi": (KNOWN[:, 0] * 3).astype(int)}
CLASSES = 3


def parameters(**values: object) -> str:
    texts = (f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items())
    return "max_batch_size: 1000 " + " ".join(texts)


def served(folder: Path, text: str, **parameter: object) -> tuple[BackendInstance, ModelConfig]:
    config = model_config(parameters(**parameter) + text)
    return load(FilBackend({}), config, folder), config


def answers(folder: Path, text: str = "", rows: Array = ROWS, **parameter: object) -> Array:
    instance, _ = served(folder, text, **parameter)
    return run(instance, input__0=rows)["output__0"]


def two_probabilities() -> str:
    return 'output { name: "output__0" data_type: TYPE_FP32 dims: [ 2 ] }'


def trained_xgboost(task: str, **more: Any) -> Any:
    objectives = {"regression": "reg:squarederror", "binary": "binary:logistic", "multi": "multi:softprob"}
    more = {"objective": objectives[task], "nthread": 1} | more | ({"num_class": CLASSES} if task == "multi" else {})
    return xgboost.train(more, xgboost.DMatrix(ROWS, TARGETS[task]), 5)


def trained_lightgbm(task: str) -> Any:
    objectives = {"regression": "regression", "binary": "binary", "multi": "multiclass"}
    more: dict[str, Any] = {"objective": objectives[task], "verbose": -1, "num_threads": 1}
    more |= {"num_class": CLASSES} if task == "multi" else {}
    return lightgbm.train(more, lightgbm.Dataset(ROWS, TARGETS[task]), 5)


@pytest.mark.parametrize("filename", ["xgboost.json", "xgboost.ubj"])
@pytest.mark.parametrize("task", list(TARGETS))
def test_answers_are_those_of_xgboost(tmp_path: Path, task: str, filename: str) -> None:
    model = trained_xgboost(task)
    model.save_model(tmp_path / filename)
    wanted = model.predict(xgboost.DMatrix(ROWS)).reshape(len(ROWS), -1)
    np.testing.assert_array_equal(answers(tmp_path), wanted)


@pytest.mark.parametrize("task", list(TARGETS))
def test_answers_are_those_of_lightgbm(tmp_path: Path, task: str) -> None:
    model = trained_lightgbm(task)
    model.save_model(tmp_path / "model.txt")
    wanted = model.predict(ROWS).reshape(len(ROWS), -1)
    np.testing.assert_array_equal(answers(tmp_path), wanted.astype(np.float32))


@pytest.mark.parametrize("task", list(TARGETS))
def test_answers_are_those_of_scikit_learn(tmp_path: Path, task: str) -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    kind = ensemble.RandomForestRegressor if task == "regression" else ensemble.RandomForestClassifier
    model = kind(5, max_depth=4, random_state=0).fit(KNOWN, TARGETS[task])
    treelite.sklearn.import_model(model).serialize(str(tmp_path / "checkpoint.tl"))
    wanted = model.predict(KNOWN)[:, None] if task == "regression" else model.predict_proba(KNOWN)
    np.testing.assert_allclose(answers(tmp_path, rows=KNOWN), wanted, rtol=1e-6)
    classes = answers(tmp_path, rows=KNOWN, output_class="true") if task != "regression" else wanted
    np.testing.assert_array_equal(classes, model.predict(KNOWN)[:, None])


def test_xgboosts_old_binary_format_is_read(tmp_path: Path) -> None:
    """Written by XGBoost 2.1, the last version that could; with its answers."""
    text = (
        "c-l+K%u8cnV6bOmfB;4)%>-q``1An$P&z3yFR`f7DkncZv$!NPnGGtOo>Wqln#x3HN0ACZZevB_4+i)C2LeW@TOgpp9z-w$2^P5fz+z"
        "yvAOK>oUbV^|DA#~22ITH%L{kUS+u6b40Hhtxp7F7ViUIiyAl!iD6bF!*3@Gks*pJ4y9}3~fh$S2uaD=1dZFh`toS-3v5sp`vGuYqT>t"
        "nBAXz9>geA^Brwx_2R$lqx%@&Dvrm<=F4$V?c2Nr<OC$UGQ-F0ZCN$Sm}92?Cr@IzK5ZHMu0SEY$@nP_2}gn479(rG%FKlysDeQq$ve"
        "@{5b(3lfVGbCs;Bm5P%Sb5i3A@{8lkQ!~>uN`Tr7m1=7Nkr#}k"
    )
    (tmp_path / "xgboost.model").write_bytes(zlib.decompress(base64.b85decode(text)))
    found = answers(tmp_path, rows=np.float32([[0, 0], [0, 1], [1, 0], [1, 1]]), model_type="xgboost")
    np.testing.assert_allclose(found[:, 0], [0.16767694, 0.8557819, 0.8624624, 0.8922586], rtol=1e-6)


def test_categories_are_taken_as_xgboost_takes_them(tmp_path: Path) -> None:
    codes = np.random.default_rng(2).integers(0, 6, (200, 1)).astype(np.float32)
    matrix = xgboost.DMatrix(codes, np.isin(codes, [1, 4]) * 1.0, feature_types=["c"], enable_categorical=True)
    model = xgboost.train({"tree_method": "hist", "nthread": 1}, matrix, 3)
    model.save_model(tmp_path / "xgboost.json")
    np.testing.assert_array_equal(answers(tmp_path, rows=codes)[:, 0], model.predict(matrix))


@pytest.mark.parametrize("objective", ["multi:softprob", "multi:softmax"])
def test_a_classifier_answers_classes_or_probabilities(tmp_path: Path, objective: str) -> None:
    trained_xgboost("multi", objective=objective).save_model(tmp_path / "xgboost.json")
    probabilities = answers(tmp_path, predict_proba="true", output_class="true")
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    classes = answers(tmp_path, output_class="true")
    np.testing.assert_array_equal(classes[:, 0], probabilities.argmax(1))
    np.testing.assert_array_equal(classes, answers(tmp_path, is_classifier="true"))


def test_a_binary_classifier_answers_by_its_threshold(tmp_path: Path) -> None:
    trained_xgboost("binary").save_model(tmp_path / "xgboost.json")
    probabilities = answers(tmp_path, predict_proba="true")
    assert probabilities.shape == (len(ROWS), 1)
    both = answers(tmp_path, two_probabilities(), predict_proba="true")
    np.testing.assert_array_equal(both, np.concatenate([1 - probabilities, probabilities], axis=1))
    for threshold in (0.3, 0.5, 0.7):
        found = answers(tmp_path, output_class="true", threshold=threshold)
        np.testing.assert_array_equal(found, probabilities > np.float32(threshold))


@pytest.mark.parametrize("task", ["binary", "multi"])
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_contributions_add_up_to_the_score(tmp_path: Path, library: str, task: str) -> None:
    if library == "xgboost":
        model = trained_xgboost(task)
        model.save_model(tmp_path / "xgboost.json")
        scores = model.predict(xgboost.DMatrix(ROWS), output_margin=True)
    else:
        model = trained_lightgbm(task)
        model.save_model(tmp_path / "model.txt")
        scores = model.predict(ROWS, raw_score=True)
    dims = [CLASSES, FEATURES + 1] if task == "multi" else [FEATURES + 1]
    text = f"""output [ {{ name: "output__0" data_type: TYPE_FP32 dims: [ {dims[0] if task == "multi" else 1} ] }},
        {{ name: "treeshap_output" data_type: TYPE_FP32 dims: {dims} }} ]"""
    instance, _ = served(tmp_path, text)
    found = run(instance, input__0=ROWS)["treeshap_output"]
    assert found.shape == (len(ROWS), *dims)
    np.testing.assert_allclose(found.sum(-1), scores, rtol=1e-3, atol=1e-4)


def test_the_configuration_is_completed(tmp_path: Path) -> None:
    trained_lightgbm("multi").save_model(tmp_path / "model.txt")
    _, config = served(tmp_path, "", predict_proba="true")
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [("input__0", [FEATURES])]
    assert [(tensor.name, list(tensor.dims)) for tensor in config.output] == [("output__0", [CLASSES])]


@pytest.mark.parametrize("filename", ["xgboost.json", "xgboost.ubj", "xgboost.model", "model.txt", "checkpoint.tl"])
@pytest.mark.parametrize("data", [b"", b"{}", b"no model of any kind" * 5])
def test_files_that_are_no_models_are_refused(tmp_path: Path, filename: str, data: bytes) -> None:
    (tmp_path / filename).write_bytes(data)
    with pytest.raises(ValueError, match=filename) as refused:
        served(tmp_path, "")
    assert str(tmp_path) not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_gpus_are_refused(tmp_path: Path) -> None:
    trained_xgboost("binary").save_model(tmp_path / "xgboost.json")
    with pytest.raises(ValueError, match="KIND_CPU"):
        load(FilBackend({}), model_config(parameters()), tmp_path, kind="GPU")
