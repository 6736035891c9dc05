"""Numbers as the answers hold them: vectors cut and scaled, as lists or base64; usage."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.engines.encoder.text import TokenizedText, Vectors
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.pooling.models import PoolingModel


class UsageObject(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def usage_object(texts: Sequence[TokenizedText]) -> UsageObject:
    total = sum(map(len, texts))
    return UsageObject(total, total)


def list_object(prefix: str, model: str, data: object, texts: Sequence[TokenizedText]) -> bytes:
    """The answer of every route but rerank."""
    return msgspec.json.encode(
        {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": usage_object(texts),
        }
    )


def check_dimensions(asked: int | None, model: PoolingModel, field: str = "dimensions") -> None:
    """Raises InvalidRequestError for a length that the model's vectors cannot be cut to."""
    if asked is None:
        return
    size = model.source.info.output_size
    trained = model.dimensions
    if trained and asked not in (*trained, size):
        shown = ", ".join(map(str, sorted({*trained, size})))
        raise InvalidRequestError(f"{field}: this model's vectors may have {shown}.", param=field)
    if not 1 <= asked <= size:
        raise InvalidRequestError(f"{field} must be between 1 and {size}.", param=field)


def finished(vectors: Vectors, dimensions: int | None, *, normalize: bool) -> Vectors:
    """Cut to their first `dimensions` numbers, then scaled to length 1."""
    cut = vectors[:, :dimensions]
    if not normalize:
        return cut
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    scaled: Vectors = np.divide(cut, lengths, out=np.zeros_like(cut), where=lengths > 0)
    return scaled


def written(vectors: Vectors, encoding_format: str | None) -> list[str] | list[list[float]]:
    if encoding_format != "base64":
        found: list[list[float]] = vectors.tolist()
        return found
    little = np.ascontiguousarray(vectors, "<f4")
    return [base64.b64encode(row).decode() for row in little]
