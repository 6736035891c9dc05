"""How well the texts of pairs go together: by a model that scores pairs, or by the angle between their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.pooling.answers import finished
from penstock.gateway.pooling.embeddings import require_one_vector
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.plane import PoolingPlane
from penstock.gateway.pooling.tokenizing import Cut, tokenize_inputs, tokenize_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    firsts: Sequence[str]
    """One for all of the others, or as many."""
    seconds: Sequence[str]
    first_field: str
    """As errors name them."""
    second_field: str
    activate: bool
    """Scores as the model's files want them; else logits."""

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.firsts)) + sum(map(len, self.seconds))


Scores = npt.NDArray[np.float32]


async def scores_of(
    plane: PoolingPlane, model: PoolingModel, pairs: Pairs, cut: Cut, context: RequestContext
) -> tuple[Scores, Sequence[TokenizedText]]:
    """One for each of `pairs.seconds`. Raises PenstockError."""
    require_one_vector(model)
    if model.head is None:
        return await _angles(plane, model, pairs, cut, context)
    if len(model.head.labels) != 1:
        raise InvalidRequestError(
            f"The model `{model.names[0]}` has {len(model.head.labels)} classes and no score; see /v1/classify.",
            param="model",
        )
    tokenize = partial(tokenize_pairs, model, pairs.firsts, pairs.seconds, cut, pairs.second_field)
    logits, texts = await plane.rows(model, tokenize, pairs.num_chars, context)
    rows = model.head.activate(logits) if pairs.activate else logits
    return rows[:, 0], texts


async def _angles(
    plane: PoolingPlane, model: PoolingModel, pairs: Pairs, cut: Cut, context: RequestContext
) -> tuple[Scores, Sequence[TokenizedText]]:
    """Cosines, with the prompts that sentence-transformers puts before queries and documents."""

    def tokenize() -> list[TokenizedText]:
        recipe = model.recipe
        found: list[TokenizedText] = []
        for kind, param, texts in (
            ("query", pairs.first_field, pairs.firsts),
            ("document", pairs.second_field, pairs.seconds),
        ):
            prompt = recipe.prompts.get(kind, recipe.default_prompt)
            found += tokenize_inputs(model, texts, cut, prompt=prompt, add_special_tokens=True, param=param)
        return found

    rows, texts = await plane.rows(model, tokenize, pairs.num_chars, context)
    vectors = finished(rows, None, normalize=True)
    cosines: Scores = (vectors[: len(pairs.firsts)] * vectors[len(pairs.firsts) :]).sum(axis=1)
    return cosines, texts
