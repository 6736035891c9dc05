"""An embedding or classifying model as a KServe model: a step of an ensemble, or what a Python model asks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from time import monotonic_ns

import numpy as np

from penstock.classic.batching.responses import OneResponse
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature, check_request
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import Tensor
from penstock.engines.encoder.text import Vectors
from penstock.engines.errors import InvalidRequestError, NotReadyError, OverloadedError, PenstockError
from penstock.gateway.apis.pooling.embeddings import vectors_of
from penstock.gateway.apis.pooling.endpoint import MAX_INPUTS
from penstock.gateway.apis.pooling.pooling import class_rows
from penstock.gateway.apis.pooling.schemas import EmbeddingRequest
from penstock.gateway.models.language.kserve.tensor_form import context_of
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane

TEXT = "text"
EMBEDDING = "embedding"
SCORES = "scores"
"""Of a model with a head: a number for each class."""


class VectorModel:
    """Implements InferModel for a model that is loaded and gives one row for a text. It does not own it.

    Input `text`: BYTES [1], in a batch of up to MAX_INPUTS. Output: `embedding` or `scores`, FP32 [numbers of a row].
    """

    def __init__(self, plane: PoolingPlane, model: PoolingModel, name: str) -> None:
        self.name = name
        self.version = 1
        self.statistics = ModelStatistics()
        self._plane = plane
        self._model = model
        self._output = EMBEDDING if model.head is None else SCORES
        self.config = _config(name, model, self._output)
        self.signature = ModelSignature(self.config)

    takes_infer = True
    model_folder: Path | None = None

    @property
    def ready(self) -> bool:
        return self._model.loaded and self._model.source.ready

    async def infer(self, request: InferRequest) -> InferResponse:
        started = monotonic_ns()
        try:
            if not self.ready:
                raise NotReadyError(f"Model '{self.name}' is not ready.", retry_after=2)
            size = check_request(request, self.signature)
            rows = await self._rows(request)
        except BaseException as error:
            self.statistics.failed(monotonic_ns() - started, _reason(error))
            raise
        self._succeeded(request, size, monotonic_ns() - started)
        return InferResponse([Tensor(self._output, "FP32", np.ascontiguousarray(rows, np.float32))])

    def stream(self, request: InferRequest) -> OneResponse:
        return OneResponse(asyncio.ensure_future(self.infer(request)))

    async def stop(self) -> None:
        """Does nothing: the model is stopped by what added it."""

    async def _rows(self, request: InferRequest) -> Vectors:
        """Raises PenstockError."""
        model, context = self._model, context_of(request)
        embedding_request = EmbeddingRequest(model=self.name, input=_texts(request), prompt_name=_prompt_name(request))
        if model.head is None:
            rows, _ = await vectors_of(self._plane, model, embedding_request, context)
        else:
            rows, _ = await class_rows(self._plane, model, embedding_request, None, context)
        return rows

    def _succeeded(self, request: InferRequest, size: int, ns: int) -> None:
        statistics = self.statistics
        if request.timings is not None:
            request.timings.add(0, ns, 0)
        if statistics.observer is not None:
            statistics.observer.request(ns, 0, 0, ns, 0)
        statistics.executed(size, 0, ns, 0)
        statistics.succeeded(
            requests=1, inferences=size, total=ns, queue=0, compute_input=0, compute_infer=ns, compute_output=0
        )


def is_offered(model: PoolingModel) -> bool:
    """Models with a vector for each token have no rows of one shape."""
    return model.task != "token_embed"


def unloaded_config(name: str) -> ModelConfig:
    """What is known of a model before it is loaded: it has one of these outputs, of a size that it does not tell."""
    return _with_outputs(name, {EMBEDDING: -1, SCORES: -1})


def _config(name: str, model: PoolingModel, output: str) -> ModelConfig:
    config = _with_outputs(name, {output: model.source.info.output_size})
    config.backend = model.source.info.runner
    return config


def _with_outputs(name: str, outputs: Mapping[str, int]) -> ModelConfig:
    config = ModelConfig(name=name, max_batch_size=MAX_INPUTS)
    config.input.add(name=TEXT, data_type="TYPE_STRING", dims=[1])
    for output, size in outputs.items():
        config.output.add(name=output, data_type="TYPE_FP32", dims=[size])
    config.version_policy.latest.num_versions = 1
    return config


def _texts(request: InferRequest) -> list[str | int | list[int]]:
    """Raises InvalidRequestError."""
    texts: list[str | int | list[int]] = []
    for number, text in enumerate(request.inputs[TEXT].array.ravel().tolist()):
        try:
            texts.append(text.decode())
        except UnicodeDecodeError:
            raise InvalidRequestError(f"element {number} of input '{TEXT}' is not UTF-8") from None
    return texts


def _prompt_name(request: InferRequest) -> str | None:
    """The request's parameter of this name. Raises InvalidRequestError."""
    prompt_name = request.parameters.get("prompt_name")
    if prompt_name is not None and not isinstance(prompt_name, str):
        raise InvalidRequestError("the parameter 'prompt_name' must be a string")
    return prompt_name


def _reason(error: BaseException) -> str:
    """Triton's label of a failure."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELED"
    if isinstance(error, OverloadedError | InvalidRequestError):
        return "REJECTED"
    return "BACKEND" if isinstance(error, PenstockError) else "OTHER"
