"""How a session runs: threads, memory, graph optimisation, from a model's configuration and the backend's options."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from penstock.classic.model_config import ModelConfig
from penstock.classic.onnxruntime.library import load_onnxruntime
from penstock.classic.parameters import choice, flag, strings, thread_count, threads_per_instance
from penstock.engines.host.cores import usable_cores

_LEVELS = {0: "ORT_ENABLE_ALL", -1: "ORT_ENABLE_BASIC", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}
"""By `optimization.graph.level`."""

_MODES = {"0": "ORT_SEQUENTIAL", "1": "ORT_PARALLEL"}

_DEFAULT_ENTRIES = {
    # Threads that wait for the next operator in a loop take the cores that the server needs to read the next request.
    "session.intra_op.allow_spinning": "0",
    "session.inter_op.allow_spinning": "0",
}

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_ERRORS, _NOTHING = 3, 4
"""Severities of ONNX Runtime's own log. What fails in a request is that request's answer and no line on stderr."""

_global_threads = threading.Lock()
_global_sizes: list[tuple[int, int]] = []
"""Of the process's thread pools, once they are made."""


def session_options(config: ModelConfig, backend_options: Mapping[str, str]) -> Any:
    """Of every instance of the model. Raises ValueError that names what cannot be."""
    onnxruntime = load_onnxruntime()
    parameters = strings(config)
    options = onnxruntime.SessionOptions()
    level = config.optimization.graph.level
    if level not in _LEVELS:
        raise ValueError(f"optimization.graph.level must be -1, 0, 1 or 2, not {level}")
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, _LEVELS[level])
    mode = choice({"execution_mode": "0"} | parameters, "execution_mode", _MODES)
    options.execution_mode = getattr(onnxruntime.ExecutionMode, mode)
    options.enable_cpu_mem_arena = flag(parameters, "enable_mem_arena", True)
    options.enable_mem_pattern = flag(parameters, "enable_mem_pattern", True)
    options.log_severity_level = _ERRORS
    _set_threads(options, config, parameters, backend_options)
    for key, value in _entries(parameters).items():
        options.add_session_config_entry(key, value)
    return options


def run_options(config: ModelConfig) -> Any:
    """Of every execution."""
    options = load_onnxruntime().RunOptions()
    options.log_severity_level = _NOTHING
    parameters = strings(config)
    if _SHRINKAGE in parameters:
        options.add_run_config_entry(_SHRINKAGE, parameters[_SHRINKAGE])
    return options


def _entries(parameters: Mapping[str, str]) -> dict[str, str]:
    """ONNX Runtime's own keys (`session.*`), passed on as they are."""
    found = _DEFAULT_ENTRIES | {key: value for key, value in parameters.items() if key.startswith("session.")}
    for key in found:
        if key.endswith(("_path", "_folder_path", "_file")):
            raise ValueError(f"parameter '{key}' is not supported: a model reads the files of its own folder")
    return found


def _set_threads(
    options: Any, config: ModelConfig, parameters: Mapping[str, str], backend_options: Mapping[str, str]
) -> None:
    if flag(backend_options, "enable-global-threadpool", False):
        _share_threads(backend_options)
        options.use_per_session_threads = False
        return
    # With its default of 0, ONNX Runtime would pin a thread to each core of the machine, whatever share of them this
    # process has, for each instance.
    options.intra_op_num_threads = thread_count(parameters, "intra_op_thread_count") or threads_per_instance(config)
    options.inter_op_num_threads = thread_count(parameters, "inter_op_thread_count")


def _share_threads(backend_options: Mapping[str, str]) -> None:
    """One pool for the operators of all models and one for their graphs. The first model makes them."""
    sizes = (
        thread_count(backend_options, "intra_op_thread_count") or usable_cores(),
        thread_count(backend_options, "inter_op_thread_count") or usable_cores(),
    )
    with _global_threads:
        if not _global_sizes:
            load_onnxruntime().set_global_thread_pool_sizes(*sizes)
            _global_sizes.append(sizes)
