"""Model folders with a model.py, loaded without a server around them."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.loading import ClassicModel, load_model
from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.python.backend import PythonBackend
from penstock.classic.tensors import Tensor, datatype_of
from penstock.engines.errors import ModelNotFoundError

CPU = "instance_group [ { kind: KIND_CPU } ]"
ADD_SUB_CONFIG = f"""
max_batch_size: 64
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }} ]
input [ {{ name: "INPUT1" data_type: TYPE_FP32 dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }} ]
output [ {{ name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 16 ] }} ]
dynamic_batching {{ }}
{CPU}
"""
ADD_SUB = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            a, b = (pb_utils.get_input_tensor_by_name(r, n).as_numpy() for n in ("INPUT0", "INPUT1"))
            outputs = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""


class FakeMetric:
    def __init__(self) -> None:
        self.current = 0.0
        self.observed: list[float] = []

    def increment(self, value: float) -> None:
        self.current += value

    def set(self, value: float) -> None:
        self.current = value

    def observe(self, value: float) -> None:
        self.observed.append(value)

    def value(self) -> float:
        return self.current


@dataclass
class FakeHost:
    """A server with the models of a test."""

    models: dict[str, InferModel] = field(default_factory=dict)
    metrics: dict[tuple[str, tuple[tuple[str, str], ...]], FakeMetric] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    loads: list[tuple[str, str | None, Mapping[str, bytes]]] = field(default_factory=list)
    unloads: list[tuple[str, bool]] = field(default_factory=list)

    def model(self, name: str, version: int = -1, request: InferRequest | None = None) -> InferModel:
        if name not in self.models or version not in (-1, 1):
            raise ModelNotFoundError(f"Request for unknown model: '{name}' is not found")
        return self.models[name]

    def model_ready(self, name: str, version: int = -1) -> bool:
        return name in self.models and self.models[name].ready

    async def use_model(self, name: str, deadline: float | None) -> Callable[[], None]:
        return lambda: None

    async def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        if name == "broken":
            raise ModelNotFoundError("failed to load 'broken', no such model")
        self.loads.append((name, config, files))

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        self.unloads.append((name, unload_dependents))

    def metric_family(self, kind: str, name: str, description: str) -> None:
        if self.kinds.setdefault(name, kind) != kind:
            raise ValueError(f"the metric '{name}' is a {self.kinds[name]}")

    def metric(
        self, kind: str, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float] = ()
    ) -> FakeMetric:
        self.metric_family(kind, name, description)
        return self.metrics.setdefault((name, tuple(sorted(labels.items()))), FakeMetric())


def write_model(folder: Path, code: str, *, name: str = "m", file: str = "model.py") -> Path:
    version = folder / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    head = "import triton_python_backend_utils as pb_utils\nimport numpy as np\n"
    (version / file).write_text(head + textwrap.dedent(code))
    return version


def parsed(config: str, name: str = "m") -> ModelConfig:
    found = text_format.Parse(config, ModelConfig())
    found.name = name
    found.backend = found.backend or "python"
    return found


@asynccontextmanager
async def loaded(
    folder: Path,
    code: str,
    config: str = ADD_SUB_CONFIG,
    *,
    name: str = "m",
    host: FakeHost | None = None,
    options: Mapping[str, str] | None = None,
) -> AsyncIterator[ClassicModel]:
    """A model of this code; it is added to the host's models."""
    host = host or FakeHost()
    version_folder = write_model(folder, code, name=name)
    complete = parsed(config, name)
    backend = PythonBackend(options or {})
    backend.auto_complete(complete, version_folder)
    context = ModelContext(
        name=name,
        version=1,
        config=complete,
        model_folder=version_folder.parent,
        version_folder=version_folder,
        host=host,
    )
    model = await load_model(context, backend)
    host.models[name] = model
    try:
        yield model
    finally:
        await model.stop()


def instances(model: ClassicModel) -> list[Any]:
    """The model's PythonInstances."""
    return [driver._backend for driver in model._instances]  # type: ignore[attr-defined]


def request(**arrays: Any) -> InferRequest:
    """Inputs by name; `id`, `outputs` and the like as `_id`, `_outputs`."""
    extra = {name[1:]: value for name, value in arrays.items() if name.startswith("_")}
    inputs = {
        name: Tensor(name, datatype_of(array.dtype), array)
        for name, array in arrays.items()
        if not name.startswith("_") and isinstance(array, np.ndarray)
    }
    return InferRequest(inputs=inputs, **extra)


def outputs(response: Any) -> dict[str, Any]:
    return {tensor.name: tensor.array for tensor in response.outputs}
