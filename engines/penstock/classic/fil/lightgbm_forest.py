"""LightGBM's text models, computed by LightGBM."""

from __future__ import annotations

import logging

import numpy as np

from penstock.classic.described import load_package
from penstock.classic.fil.settings import INSTALL, FilSettings
from penstock.classic.tensors import Array

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
        found: Array = self._booster.predict(rows, num_threads=self._threads)
        return found.reshape(len(rows), -1).astype(np.float32)

    def contributions(self, rows: Array) -> Array:
        found: Array = self._booster.predict(rows, pred_contrib=True, num_threads=self._threads)
        return found.reshape(len(rows), -1, self.features + 1).astype(np.float32)
