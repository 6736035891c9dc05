"""Two models' tensors, for the benchmarks of the KServe protocols."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from penstock.classic.base import InferModel
from penstock.classic.messages import InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensors import Tensor

IMAGE = (1, 3, 224, 224)


@dataclass(frozen=True)
class _Named:
    """As much of an InferModel as the codecs look at."""

    name: str
    version: int
    config: ModelConfig


def model(name: str) -> InferModel:
    return cast(InferModel, _Named(name, 1, ModelConfig(name=name)))


def tensors(kind: str, prefix: str) -> list[Tensor]:
    """`add_sub`: two of 16 floats. `image`: one of 602 kB."""
    shapes = [(1, 16), (1, 16)] if kind == "add_sub" else [IMAGE]
    rng = np.random.default_rng(7)
    arrays = [rng.random(shape, np.float32) for shape in shapes]
    return [Tensor(f"{prefix}{index}", "FP32", array) for index, array in enumerate(arrays)]


def response(kind: str) -> InferResponse:
    return InferResponse(tensors(kind, "OUTPUT"))
