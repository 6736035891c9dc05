"""Forests of decision trees behind one interface: XGBoost's, LightGBM's and treelite's, and the parameters of a model
in Triton's names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.classic.frameworks import load_package
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path
from penstock.classic.parameters import flag, number, strings, thread_count, whole_number
from penstock.classic.tensors import Array

INSTALL = "'penstock-server[fil]'"
"""What pip installs for the libraries."""
FILENAMES = {
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "xgboost": "xgboost.model",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
"""By `model_type`."""

_CHOICES = {
    "algo": {"ALGO_AUTO", "NAIVE", "TREE_REORG", "BATCH_TREE_REORG"},
    "storage_type": {"AUTO", "DENSE", "SPARSE", "SPARSE8"},
}
_COUNTS = ("blocks_per_sm", "threads_per_tree", "transfer_threshold", "chunk_size")
_FLAGS = ("use_experimental_optimizations", "xgboost_allow_unknown_field")
"""These tune Triton's own library and change no answer. They have no effect here, but must be valid."""


@dataclass(frozen=True, slots=True)
class FilSettings:
    model_type: str
    path: Path
    threads: int
    """Of each instance."""
    is_classifier: bool
    """Without `probabilities`, answers are classes and not the model's scores."""
    probabilities: bool
    """A classifier's answers are probabilities, also where the model was trained to answer classes."""
    threshold: float
    """The probability above which the answer of a binary classifier is 1."""

    @property
    def answers_class(self) -> bool:
        return self.is_classifier and not self.probabilities


def read_settings(config: ModelConfig, version_folder: Path) -> FilSettings:
    """Raises ValueError that names the parameter, or the file that is missing."""
    values = strings(config)
    for key, choices in _CHOICES.items():
        if values.get(key, min(choices)) not in choices:
            raise ValueError(
                f"parameter '{key}' must be one of {', '.join(sorted(choices))}, not '{values[key][:100]}'"
            )
    for key in _COUNTS:
        whole_number(values, key)
    for key in _FLAGS:
        flag(values, key, False)
    model_type = values.get("model_type") or _by_file(config, version_folder)
    if model_type not in FILENAMES:
        raise ValueError(f"parameter 'model_type' must be one of {', '.join(FILENAMES)}, not '{model_type[:100]}'")
    return FilSettings(
        model_type=model_type,
        path=model_path(config, version_folder, FILENAMES[model_type]),
        threads=_threads(values),
        is_classifier=flag(values, "is_classifier", flag(values, "output_class", False)),
        probabilities=flag(values, "predict_proba", False),
        threshold=number(values, "threshold", 0.5),
    )


def _threads(values: Mapping[str, str]) -> int:
    """One, unless the model says more: the libraries' threads spin while they wait for each other, and beside the
    server's own work on the same cores two were measured to be up to 70 times slower than one."""
    automatic = values.get("cpu_nthread", "").strip() in ("", "-1")
    return (0 if automatic else thread_count(values, "cpu_nthread")) or 1


def _by_file(config: ModelConfig, version_folder: Path) -> str:
    """Triton takes a missing `model_type` for XGBoost's old binary format; here the file's name tells."""
    if config.default_model_filename:
        kinds = [
            kind for kind, name in FILENAMES.items() if Path(name).suffix == Path(config.default_model_filename).suffix
        ]
    else:
        kinds = [kind for kind, name in FILENAMES.items() if (version_folder / name).is_file()]
    if len(kinds) != 1:
        names = ", ".join(FILENAMES.values())
        raise ValueError(f"model '{config.name}' needs the parameter 'model_type', or exactly one of the files {names}")
    return kinds[0]


class Forest(Protocol):
    """A loaded model. Several threads may use it at a time."""

    features: int

    def scores(self, rows: Array) -> Array:
        """FP32 [rows, features] to [rows, outputs]: what the library's own `predict` answers (probabilities of a
        classifier). One output for regression and for binary classifiers, otherwise one for each class."""
        ...

    def contributions(self, rows: Array) -> Array:
        """SHAP values, [rows, outputs, features + 1]: the last one of each output is the bias."""
        ...

    @property
    def explains(self) -> bool:
        """Whether it has `contributions`."""
        ...


def open_forest(settings: FilSettings) -> Forest:
    """Raises ValueError when the file cannot be loaded, or when its library is not installed."""
    if settings.model_type in ("xgboost_json", "xgboost_ubj"):
        # loading leaves an idle OpenMP thread behind for each thread that ever did it: they end with this one
        with ThreadPoolExecutor(1) as loader:
            return loader.submit(XGBoostForest, settings).result()
    if settings.model_type == "lightgbm":
        return LightGBMForest(settings)
    return TreeliteForest(settings)


_XGBOOST_PLACE = re.compile(r"^\[[\d:]*\] \S+:\d+: ")
"""Before an error's text; a stack follows it."""


class XGBoostForest:
    explains = True

    def __init__(self, settings: FilSettings) -> None:
        self._xgboost = load_package("xgboost", "XGBoost models", INSTALL)
        booster = self._xgboost.Booster({"nthread": settings.threads})
        try:
            # not from memory: there an empty or truncated file ends the process
            booster.load_model(settings.path)
            if '"multi:softmax"' in booster.save_config():
                # it answers classes, from which nobody could tell the probabilities
                booster.set_param({"objective": "multi:softprob"})
            self.features = int(booster.num_features())
            # what the library cannot compute (linear models) fails here, and not at the first request
            booster.inplace_predict(np.full((1, self.features), np.nan, np.float32))
        except self._xgboost.core.XGBoostError as error:
            raise ValueError(_xgboost_error(settings, error)) from error
        self._booster = booster

    def scores(self, rows: Array) -> Array:
        scores: Array = self._booster.inplace_predict(rows, validate_features=False)
        return scores.reshape(len(rows), -1)

    def contributions(self, rows: Array) -> Array:
        matrix = self._xgboost.DMatrix(rows)
        contributions: Array = self._booster.predict(matrix, pred_contribs=True, validate_features=False)
        return contributions.reshape(len(rows), -1, self.features + 1)


def _xgboost_error(settings: FilSettings, error: Exception) -> str:
    text = _XGBOOST_PLACE.sub("", str(error).strip().splitlines()[0]).replace(str(settings.path), settings.path.name)
    return f"'{settings.path.name}' cannot be loaded: {text}"


_TREELITE_PLACE = re.compile(r"^\[[\d:]*\] \S+:\d+: (Check failed: [^:]*: )?")


class TreeliteForest:
    """Computed by treelite's own library (GTIL), in the model's precision: FP32 or FP64."""

    explains = False

    def __init__(self, settings: FilSettings) -> None:
        treelite = load_package("treelite", f"models of type {settings.model_type}", INSTALL)
        self._predict = load_package("treelite.gtil", "treelite checkpoints", INSTALL).predict
        self._threads = settings.threads
        path = str(settings.path)
        try:
            if settings.model_type == "xgboost":
                self._model = treelite.frontend.load_xgboost_model_legacy_binary(path)
            else:
                self._model = treelite.Model.deserialize(path)
        except treelite.TreeliteError as error:
            raise ValueError(_treelite_error(settings, error)) from error
        self.features = int(self._model.num_feature)

    def scores(self, rows: Array) -> Array:
        # [rows, targets, classes], one of them 1
        scores = self._predict(self._model, rows, nthread=self._threads)
        return scores.reshape(len(rows), -1).astype(np.float32, copy=False)

    def contributions(self, rows: Array) -> Array:
        raise ValueError("treelite computes no SHAP values")


def _treelite_error(settings: FilSettings, error: Exception) -> str:
    text = " ".join(_TREELITE_PLACE.sub("", str(error)).replace(str(settings.path), settings.path.name).split())
    return f"'{settings.path.name}' cannot be loaded: {text}"


_QUIET = logging.getLogger("penstock.lightgbm")
_QUIET.setLevel(logging.ERROR)
"""For the library, which prints to stdout otherwise. What it complains about is raised as well."""


class LightGBMForest:
    """Computes in FP64, whatever the rows are."""

    explains = True

    def __init__(self, settings: FilSettings) -> None:
        lightgbm = load_package("lightgbm", "LightGBM models", INSTALL)
        lightgbm.register_logger(_QUIET)
        try:
            self._booster = lightgbm.Booster(model_str=settings.path.read_text())
        except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
            raise ValueError(f"'{settings.path.name}' cannot be loaded: {error}") from error
        self.features = int(self._booster.num_feature())
        self._threads = settings.threads

    def scores(self, rows: Array) -> Array:
        scores: Array = self._booster.predict(rows, num_threads=self._threads)
        return scores.reshape(len(rows), -1).astype(np.float32)

    def contributions(self, rows: Array) -> Array:
        contributions: Array = self._booster.predict(rows, pred_contrib=True, num_threads=self._threads)
        return contributions.reshape(len(rows), -1, self.features + 1).astype(np.float32)
