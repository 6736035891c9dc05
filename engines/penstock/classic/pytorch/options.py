"""PyTorch, imported when the first model needs it, and the parameters of Triton's PyTorch backend."""

from __future__ import annotations

import importlib.util
import re
import threading
from dataclasses import dataclass
from typing import Any

from penstock.classic.frameworks import load_package, missing_package
from penstock.classic.model_config import ModelConfig
from penstock.classic.parameters import flag, strings, thread_count, threads_per_instance

_LAST_ERROR = re.compile(r"^(?:\w+(?:Error|Exception)): (.*)", re.MULTILINE | re.DOTALL)
_NATIVE_FRAMES = re.compile(r"\n(?:Exception raised from|C\+\+ CapturedTraceback|frame #).*", re.DOTALL)
_INSTALL = "'penstock-server[pytorch]'"


def check_installed() -> None:
    """Raises ValueError, without the seconds that an import takes."""
    if importlib.util.find_spec("torch") is None:
        raise missing_package("torch", "PyTorch models", "it is not installed", _INSTALL)


def load_torch(module: str = "torch") -> Any:
    """The module. Raises ValueError that says how to install it."""
    return load_package(module, "PyTorch models", _INSTALL)


def explain(error: Exception) -> str:
    """A text without tracebacks and places: TorchScript puts the model's source before what happened."""
    text = _NATIVE_FRAMES.sub("", str(error))
    errors = _LAST_ERROR.findall(text)
    return (errors[-1] if errors else text).strip()[:400] or type(error).__name__


_WHOLE_PROCESS = {"ENABLE_JIT_EXECUTOR": True, "ENABLE_JIT_PROFILING": True, "DISABLE_CUDNN": False}
"""Switches of PyTorch that there is one of for all models, with the values that they keep."""

_interop = threading.Lock()
_interop_counts: list[int] = []


@dataclass(frozen=True, slots=True)
class PyTorchOptions:
    inference_mode: bool
    """False: gradients are off all the same, but views and versions of tensors are tracked."""
    optimized: bool
    """TorchScript's optimizations at the first executions."""
    shared_weights: bool
    """The instances on a device have one copy of the model."""
    clean_cache: bool
    """A GPU's cached memory goes back after every execution."""
    threads: int
    """That an operator may use."""


def options(config: ModelConfig) -> PyTorchOptions:
    """Raises ValueError that names what cannot be."""
    parameters = strings(config)
    for key, kept in _WHOLE_PROCESS.items():
        if flag(parameters, key, kept) != kept:
            raise ValueError(f"parameter '{key}' is not supported: it would change all models of the server")
    _set_interop_threads(thread_count(parameters, "INTER_OP_THREAD_COUNT"))
    return PyTorchOptions(
        inference_mode=flag(parameters, "INFERENCE_MODE", True),
        optimized=not flag(parameters, "DISABLE_OPTIMIZED_EXECUTION", False),
        shared_weights=flag(parameters, "ENABLE_WEIGHT_SHARING", False),
        clean_cache=flag(parameters, "ENABLE_CACHE_CLEANING", False),
        threads=thread_count(parameters, "INTRA_OP_THREAD_COUNT") or threads_per_instance(config),
    )


def _set_interop_threads(count: int) -> None:
    """There is one pool for the process, whose size is fixed by the first model that asks for one."""
    if not count:
        return
    with _interop:
        if not _interop_counts:
            try:
                load_torch().set_num_interop_threads(count)
            except RuntimeError:  # models run already
                _interop_counts.append(load_torch().get_num_interop_threads())
            else:
                _interop_counts.append(count)
        if _interop_counts[0] != count:
            raise ValueError(
                f"parameter 'INTER_OP_THREAD_COUNT' is {count}, and the server's pool, one for all models, has"
                f" {_interop_counts[0]} threads"
            )
