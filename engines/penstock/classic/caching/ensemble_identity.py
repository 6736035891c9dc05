"""What a cached answer of an ensemble depends on beside the request: the models that its steps run."""

from __future__ import annotations

from uuid import uuid4
from weakref import WeakKeyDictionary

from penstock.classic.base import InferModel
from penstock.classic.caching.cached_model import uncached
from penstock.classic.ensemble.model import EnsembleModel


class EnsembleIdentity:
    """Is another one as soon as one of the models, at any depth, has been loaded again."""

    def __init__(self, ensemble: EnsembleModel) -> None:
        self._ensemble = ensemble
        self._known: WeakKeyDictionary[InferModel, bytes] = WeakKeyDictionary()

    def __call__(self) -> bytes:
        """Raises PenstockError when a model is gone."""
        return b"".join(self._parts(self._ensemble))

    def _parts(self, model: InferModel) -> list[bytes]:
        parts = [self._known.setdefault(model, uuid4().bytes)]
        if isinstance(model, EnsembleModel):
            for each in model.step_models().values():
                parts += self._parts(uncached(each))
        return parts
