"""POST /classify and /v1/classify, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.encoder.text import TokenizedText, Vectors
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.pooling.answers import list_object
from penstock.gateway.pooling.embeddings import rows_of_inputs
from penstock.gateway.pooling.endpoint import PoolingEndpoint
from penstock.gateway.pooling.heads import Head
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.plane import PoolingPlane
from penstock.gateway.pooling.schemas import ClassifyRequest, InputRequest


class Classify(PoolingEndpoint[ClassifyRequest]):
    schema = ClassifyRequest
    needs = ("classify",)

    async def answer(self, request: ClassifyRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        head = head_of(model)
        rows, texts = await class_rows(self.plane, model, request, request.use_activation, context)
        data = [
            {"index": index, "label": head.labels[best], "probs": row, "num_classes": len(row)}
            for index, (row, best) in enumerate(zip(rows.tolist(), rows.argmax(axis=1).tolist(), strict=True))
        ]
        return list_object("classify", request.model, data, texts)


def head_of(model: PoolingModel) -> Head:
    """Raises InvalidRequestError where it has none."""
    if model.head is None:
        raise InvalidRequestError(
            f"The model `{model.names[0]}` gives embeddings and no classes; see /v1/embeddings.", param="model"
        )
    return model.head


async def class_rows(
    plane: PoolingPlane,
    model: PoolingModel,
    request: InputRequest,
    use_activation: bool | None,
    context: RequestContext,
) -> tuple[Vectors, Sequence[TokenizedText]]:
    """A number for each class of each text. Raises PenstockError."""
    head = head_of(model)
    logits, texts = await rows_of_inputs(plane, model, request, "", context)
    return logits if use_activation is False else head.activate(logits), texts
