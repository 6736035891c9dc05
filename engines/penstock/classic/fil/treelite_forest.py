"""Treelite's checkpoints, the way of scikit-learn's and cuML's forests into Triton, and XGBoost's old binary format."""

from __future__ import annotations

import re

import numpy as np

from penstock.classic.described import load_package
from penstock.classic.fil.settings import INSTALL, FilSettings
from penstock.classic.tensors import Array

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
        found = self._predict(self._model, rows, nthread=self._threads)
        return found.reshape(len(rows), -1).astype(np.float32, copy=False)

    def contributions(self, rows: Array) -> Array:
        raise ValueError("treelite computes no SHAP values")


def _treelite_error(settings: FilSettings, error: Exception) -> str:
    text = " ".join(_TREELITE_PLACE.sub("", str(error)).replace(str(settings.path), settings.path.name).split())
    return f"'{settings.path.name}' cannot be loaded: {text}"
