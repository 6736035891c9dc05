"""What a forest is to the backend, whichever library computes it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from penstock.classic.fil.lightgbm_forest import LightGBMForest
from penstock.classic.fil.settings import FilSettings
from penstock.classic.fil.treelite_forest import TreeliteForest
from penstock.classic.fil.xgboost_forest import XGBoostForest
from penstock.classic.tensors import Array


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
