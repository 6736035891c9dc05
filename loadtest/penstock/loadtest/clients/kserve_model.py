"""What a KServe server says of a model."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.discover import ask
from penstock.loadtest.errors import UNREADABLE, LoadTestError


class TensorMetadata(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int] = []


class ModelMetadata(msgspec.Struct):
    """Of GET /v2/models/M, or of the RPC ModelMetadata."""

    inputs: list[TensorMetadata] = []


async def model_metadata(options: ClientOptions) -> ModelMetadata:
    """Raises LoadTestError when the server has none of this model."""
    if not options.model:
        raise LoadTestError("model: choose one with --model")
    answer = await ask(options, f"/v2/models/{quote(options.model, safe='')}")
    if answer.status != 200:
        raise LoadTestError(f"{options.url} has no metadata of the model {options.model!r} (status {answer.status})")
    try:
        return msgspec.json.decode(answer.body, type=ModelMetadata, strict=False)
    except UNREADABLE as error:
        raise LoadTestError(f"the metadata of the model {options.model!r} are none: {error}") from None
