"""XGBoost's JSON and UBJSON models, computed by XGBoost."""

from __future__ import annotations

import re

import numpy as np

from penstock.classic.described import load_package
from penstock.classic.fil.settings import INSTALL, FilSettings
from penstock.classic.tensors import Array

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
        found: Array = self._booster.inplace_predict(rows, validate_features=False)
        return found.reshape(len(rows), -1)

    def contributions(self, rows: Array) -> Array:
        matrix = self._xgboost.DMatrix(rows)
        found: Array = self._booster.predict(matrix, pred_contribs=True, validate_features=False)
        return found.reshape(len(rows), -1, self.features + 1)


def _xgboost_error(settings: FilSettings, error: Exception) -> str:
    text = _XGBOOST_PLACE.sub("", str(error).strip().splitlines()[0]).replace(str(settings.path), settings.path.name)
    return f"'{settings.path.name}' cannot be loaded: {text}"
