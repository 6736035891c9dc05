"""POST /pooling and /classify, as in vLLM: whatever a model gives for a text, or its classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from penstock.engines.encoder.text import TokenizedText, Vectors
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.pooling.embeddings import rows_of_inputs, vectors_of
from penstock.gateway.apis.pooling.endpoint import PoolingEndpoint, list_object, written
from penstock.gateway.apis.pooling.schemas import ClassifyRequest, InputRequest, PoolingTaskRequest
from penstock.gateway.models.pooling.model import Head, PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.context import RequestContext


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


class Pooling(PoolingEndpoint[PoolingTaskRequest]):
    schema = PoolingTaskRequest

    async def answer(self, request: PoolingTaskRequest, context: RequestContext) -> bytes:
        model = self.plane.model(request.model, context)
        _check_task(request, model)
        if model.head is None:
            rows, texts = await vectors_of(self.plane, model, request, context)
        else:
            rows, texts = await class_rows(self.plane, model, request, request.use_activation, context)
        return await self.plane.in_pool(rows.size, partial(_answer, request, model.task, rows, texts))


def _check_task(request: PoolingTaskRequest, model: PoolingModel) -> None:
    """Raises InvalidRequestError for what is not this model's to do."""
    task = model.task
    if request.task not in (None, task):
        raise InvalidRequestError(f"task: the model `{request.model}` offers {task}.", param="task")
    for name in ("dimensions", "normalize", "prompt_name"):
        if model.head is not None and getattr(request, name) is not None:
            raise InvalidRequestError(f"{name} means nothing to a model for the task {task}.", param=name)


def _answer(request: PoolingTaskRequest, task: str, rows: Vectors, texts: Sequence[TokenizedText]) -> bytes:
    outputs: list[Any] = written(rows, request.encoding_format)
    if task == "token_embed":
        values = iter(outputs)
        outputs = [list(islice(values, len(text))) for text in texts]
    data = [{"index": index, "object": "pooling", "data": output} for index, output in enumerate(outputs)]
    return list_object("pool", request.model, data, texts)
