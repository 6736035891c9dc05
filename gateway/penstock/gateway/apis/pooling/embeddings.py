"""POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import msgspec

from penstock.engines.encoder.text import TokenizedText, Vectors
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.pooling.endpoint import (
    MAX_INPUTS,
    PoolingEndpoint,
    check_dimensions,
    finished,
    list_object,
    written,
)
from penstock.gateway.apis.pooling.schemas import (
    UNSUPPORTED,
    Direction,
    EmbeddingRequest,
    InputRequest,
    TeiEmbedRequest,
)
from penstock.gateway.apis.pooling.tokenizing import Cut, tokenize_inputs, truncation
from penstock.gateway.generating.request_reading import texts_or_ids
from penstock.gateway.models.entries import Kind
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.context import RequestContext


class Embeddings(PoolingEndpoint[EmbeddingRequest]):
    schema = EmbeddingRequest
    needs = ("embedding", "token_embedding")
    kind = Kind.EMBEDDINGS

    async def answer(self, request: EmbeddingRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        vectors, texts = await embed(self.plane, model, request, context)
        return await self.plane.in_pool(vectors.size, partial(_answer, request, vectors, texts))


def require_one_vector(model: PoolingModel) -> None:
    """For each text. Raises InvalidRequestError."""
    if model.task == "token_embed":
        raise InvalidRequestError(
            f"The model `{model.names[0]}` gives a vector for each token; see /pooling.", param="model"
        )


async def embed(
    plane: PoolingPlane,
    model: PoolingModel,
    request: EmbeddingRequest,
    context: RequestContext,
    cut: Cut | None = None,
    field: str = "input",
) -> tuple[Vectors, Sequence[TokenizedText]]:
    """A vector for each text, as long and as scaled as the request wants them. `cut`: of an API with other words for
    that than truncate_prompt_tokens; `field`: where it has the texts. Raises PenstockError."""
    require_one_vector(model)
    return await vectors_of(plane, model, request, context, cut, field)


async def vectors_of(
    plane: PoolingPlane,
    model: PoolingModel,
    request: EmbeddingRequest,
    context: RequestContext,
    cut: Cut | None = None,
    field: str = "input",
) -> tuple[Vectors, Sequence[TokenizedText]]:
    """As `embed`, also of a model with a vector for each token."""
    if model.head is not None:
        raise InvalidRequestError(
            f"The model `{request.model}` gives scores or classes and no embeddings; see /v1/rerank, /v1/score, "
            "/v1/classify.",
            param="model",
        )
    check_dimensions(request.dimensions, model)
    prompt = _prompt(model, request.prompt_name or _prompt_of_type(model, request.input_type, context))
    vectors, texts = await rows_of_inputs(plane, model, request, prompt, context, cut, field)
    normalize = request.normalize
    if normalize is None:
        normalize = model.recipe.normalize and request.use_activation is not False
    return finished(vectors, request.dimensions, normalize=normalize), texts


async def rows_of_inputs(
    plane: PoolingPlane,
    model: PoolingModel,
    request: InputRequest,
    prompt: str,
    context: RequestContext,
    cut: Cut | None = None,
    field: str = "input",
) -> tuple[Vectors, Sequence[TokenizedText]]:
    if request.padding not in (None, False, "do_not_pad"):
        context.ignore("padding", "texts are computed without padding, which changes no vector")
    inputs = texts_or_ids(request.input, model.source.info.vocab_size, MAX_INPUTS, field)
    tokenize = partial(
        tokenize_inputs,
        model,
        inputs,
        truncation(request, model) if cut is None else cut,
        prompt=prompt,
        add_special_tokens=request.add_special_tokens is not False,
        param=field,
    )
    return await plane.rows(model, tokenize, sum(map(len, inputs)), context)


_PROMPT_NAMES = {"search_query": "query", "search_document": "document", "passage": "document"}
"""What sentence-transformers calls the prompts of these types; those of other types have names of their own."""


def _prompt_of_type(model: PoolingModel, input_type: str | None, context: RequestContext) -> str | None:
    """The name of the prompt for this type of texts; None: the model's default. A model without prompts treats all
    types alike, so nothing is lost there."""
    prompts = model.recipe.prompts
    if input_type is None or not prompts:
        return None
    for name in (input_type, _PROMPT_NAMES.get(input_type)):
        if name in prompts:
            return name
    context.ignore("input_type", "this model has no prompt for it")
    return None


def _prompt(model: PoolingModel, name: str | None) -> str:
    if name is None:
        return model.recipe.default_prompt
    prompts = model.recipe.prompts
    if name not in prompts:
        known = f"its prompts are {', '.join(prompts)}" if prompts else "it has none"
        raise InvalidRequestError(f"prompt_name: this model has no such prompt; {known}.", param="prompt_name")
    return prompts[name]


def _answer(request: EmbeddingRequest, vectors: Vectors, texts: Sequence[TokenizedText]) -> bytes:
    data = [
        {"index": index, "object": "embedding", "embedding": vector}
        for index, vector in enumerate(written(vectors, request.encoding_format))
    ]
    return list_object("embd", request.model, data, texts)


class TeiEmbed(PoolingEndpoint[TeiEmbedRequest]):
    schema = TeiEmbedRequest
    needs = ("embedding",)
    unsupported: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **UNSUPPORTED,
        **dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), ("null",)),
    }

    async def answer(self, request: TeiEmbedRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        embedding = EmbeddingRequest(
            model=model.names[0],
            input=request.inputs,
            dimensions=request.dimensions,
            prompt_name=request.prompt_name,
            normalize=request.normalize is not False,
        )
        cut = tei_cut(request.truncate, request.truncation_direction, model)
        vectors, _ = await embed(self.plane, model, embedding, context, cut, "inputs")
        return await self.plane.in_pool(vectors.size, lambda: msgspec.json.encode(vectors.tolist()))


def tei_cut(
    truncate: bool | None, direction: Direction | None, model: PoolingModel, of_second: int | None = None
) -> Cut:
    """As the fields `truncate` and `truncation_direction` say; by default long texts are cut, as TEI does it."""
    return Cut(
        most=model.source.info.max_tokens,
        allowed=truncate is not False,
        of_second=of_second,
        at_start=direction in ("Left", "left"),
        way_out="truncate",
    )
