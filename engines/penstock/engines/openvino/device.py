"""Compiling for a device: how many threads a model gets, and what the plugin may remember."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import openvino as ov

from penstock.engines.contract.loading import Loading, Report
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.openvino.numerics import Numerics
from penstock.engines.openvino.process_memory import mapped_pages_released
from penstock.engines.openvino.quantization import GROUP

_DEVICE = "CPU"
"""Elsewhere the cache would have to be tensors of the device, which the block copies are not made for."""

_WEIGHT_BYTES_PER_THREAD = 32 << 20
"""Reading this much takes a core above a millisecond. With less to do, threads mostly wait for each other: one token of
a model of 10 MB is no faster on two threads, and up to 1.7 times slower where the second core has other work."""

_WORK_PER_THREAD = 12 << 20
"""Bytes of weights times tokens that make one more thread worth waking (7 M and 5 M parameter models, two cores)."""

_MAX_COPIED_BYTES = 256 << 20
"""Larger models are compiled once: each compilation holds its own packed weights."""

_LEAST_TOKENS_OF_LARGE_STEPS = 48
"""With int4, 32 tokens took 0.9 and 64 tokens 1.13 times as long in int8 as in bf16."""

_RUNTIME_CACHE = "CPU_RUNTIME_CACHE_CAPACITY"
_PRIMITIVE_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_CACHED_KERNELS = 64
"""How many kernels for shapes that occurred before the plugin and oneDNN each keep. Every length of a prompt is a new
shape: with their own defaults (5,000 and 1,024) a process grows by hundreds of megabytes over some 10,000 requests.
With 16 a prompt takes the place of what decodes need, and the other way round. The environment variables of these names
say otherwise."""
_CACHED_KERNELS_OF_EXPERTS = 512
"""Each expert of a step has another number of rows: with 64, a prompt takes twice as long."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """A number of threads that the model is compiled for, and which batches are computed with it."""

    threads: int
    min_tokens: int = 0
    """Fewest tokens of a batch."""
    is_large: bool = False
    """They are the large steps of `Numerics.large_steps`."""


def plan_threads(weight_bytes: int, cores: int, threads: int | None, most_tokens: int) -> list[ThreadPlan]:
    """By `min_tokens`, ascending.

    OpenVINO fixes the number of threads when it compiles. A single token of a small model is no faster on two threads
    than on one, but a prompt or a batch is: so a small model is compiled twice, and both work on the same KV cache. Not
    where the number of threads was asked for, or where no batch could have enough of its `most_tokens`.
    """
    if threads is not None:
        return [ThreadPlan(threads)]
    few, many = default_threads(weight_bytes, cores), all_threads(cores)
    plans = [ThreadPlan(few)]
    min_tokens = max(2, -(-many * _WORK_PER_THREAD // weight_bytes))
    if few < many and weight_bytes <= _MAX_COPIED_BYTES and min_tokens <= most_tokens:
        plans.append(ThreadPlan(many, min_tokens))
    return plans


def with_large_steps(plans: Sequence[ThreadPlan], most_tokens: int) -> list[ThreadPlan]:
    """And one for large steps (`Numerics.large_steps`), where steps of `most_tokens` are."""
    least = max(_LEAST_TOKENS_OF_LARGE_STEPS, plans[-1].min_tokens + 1)
    large = [ThreadPlan(plans[-1].threads, least, is_large=True)] if least <= most_tokens else []
    return [*plans, *large]


def default_threads(weight_bytes: int, cores: int) -> int:
    """One thread for each 32 MiB of weights, on at most all `cores`; of more than two one is left to the server.

    A compute thread that has to share its core holds up all the others at every layer.
    """
    return max(1, min(all_threads(cores), weight_bytes // _WEIGHT_BYTES_PER_THREAD))


def all_threads(cores: int) -> int:
    """As many as a step may use at most."""
    return cores if cores <= 2 else cores - 1


class GraphSource(Protocol):
    """A model's graph before it is made: of weights, or read from a file."""

    @property
    def numerics(self) -> Numerics: ...

    @property
    def has_experts(self) -> bool: ...

    def make(self) -> ov.Model: ...

    def release_pages(self) -> None:
        """Gives the memory of mapped files back to the system."""
        ...


@contextmanager
def compiled(source: GraphSource, plans: Sequence[ThreadPlan], report: Report) -> Iterator[list[Any]]:
    """The model compiled for each plan. Inside, it computes its first tokens: the plugin packs the weights then, and
    what it has read of mapped files is given back."""
    with mapped_pages_released(source.release_pages):
        yield _compiled(source, plans, report)


def _compiled(source: GraphSource, plans: Sequence[ThreadPlan], report: Report) -> list[Any]:
    graph, core = source.make(), ov.Core()
    report(Loading("compile"))
    return [compile_graph(core, graph, source.numerics, plan, source.has_experts) for plan in plans]


def compile_graph(core: ov.Core, graph: ov.Model, numerics: Numerics, plan: ThreadPlan, has_experts: bool) -> Any:
    """The compiled model. Cache inputs of a decoder show the layout that the device wants."""
    if plan.is_large:
        numerics = numerics.for_large_steps()
    kernels = _cached_kernels(_CACHED_KERNELS_OF_EXPERTS if has_experts else _CACHED_KERNELS)
    properties: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": numerics.dtype,
        "INFERENCE_NUM_THREADS": plan.threads,
        # Pinned threads cannot step aside for the server's other processes: a step took up to 1.8 times as long.
        "ENABLE_CPU_PINNING": False,
        # One batch computes at a time: the infer requests share one stream and its working memory.
        "NUM_STREAMS": 1,
        _RUNTIME_CACHE: kernels,
    }
    if numerics.kv is not None:
        properties |= numerics.kv.properties
    if numerics.integers and not numerics.rounds:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    elif numerics.rounds and not numerics.is_exported:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = GROUP
    try:
        return core.compile_model(graph, _DEVICE, properties)
    except RuntimeError as e:
        raise UnsupportedError(f"OpenVINO does not compile the model for {_DEVICE}: {_last_line(e)}") from e


def _cached_kernels(default: int) -> int:
    """An operator's environment variables take precedence. Raises InvalidRequestError for one that is no number."""
    for name in (_RUNTIME_CACHE, _PRIMITIVE_CACHE):
        value = os.environ.setdefault(name, str(default))  # oneDNN reads its own when it makes its first kernel
        if not value.isdecimal():
            raise InvalidRequestError(f"the environment variable {name}={value!r} is not a number of kernels")
    return int(os.environ[_RUNTIME_CACHE])


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
