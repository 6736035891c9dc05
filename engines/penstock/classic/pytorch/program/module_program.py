"""A torch.nn.Module in a model.py, as a Python model: what `runtime: "model.py"` of the pytorch backend runs.

model.pt beside it has the weights (a state_dict), if there are any.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton_python_backend_utils as pb_utils

_COMPILE = "TORCH_COMPILE_OPTIONAL_PARAMETERS"


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        for name, default in (("NUM_THREADS", "1"), ("NUM_INTEROP_THREADS", "1")):
            getattr(torch, f"set_{name.lower()}")(int(parameters.get(name, default)))
        self._batched = config["max_batch_size"] > 0
        self._inputs = [tensor["name"] for tensor in config["input"]]
        self._outputs = [tensor["name"] for tensor in config["output"]]
        on_gpu = args["model_instance_kind"] == "GPU"
        self._device = torch.device(f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu")
        file = pathlib.Path(pb_utils.get_model_dir()) / (config["default_model_filename"] or "model.py")
        module = _load(file.with_suffix(".py"), self._device)
        # compiling takes minutes at the first request: only where it is asked for
        self._model = torch.compile(module, **json.loads(parameters[_COMPILE])) if _COMPILE in parameters else module

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        groups = [requests] if self._batched else [[request] for request in requests]
        with torch.inference_mode():
            return [response for group in groups for response in self._execute(group)]

    def _execute(self, requests: Sequence[Any]) -> Iterator[Any]:
        """One call of the module for all of them."""
        arrays = [[pb_utils.get_input_tensor_by_name(r, name).as_numpy() for name in self._inputs] for r in requests]
        parts = [[torch.tensor(array, device=self._device) for array in row] for row in arrays]
        feed = parts[0] if len(parts) == 1 else [torch.cat(column) for column in zip(*parts, strict=True)]
        results = self._model(*feed)
        results = results if isinstance(results, tuple | list) else (results,)
        if len(results) < len(self._outputs):
            raise ValueError(f"the module gave {len(results)} outputs, the configuration has {len(self._outputs)}")
        columns = [tensor.detach().cpu().contiguous().numpy() for tensor in results[: len(self._outputs)]]
        start = 0
        for row in arrays:
            stop = start + len(row[0]) if self._batched else None
            pieces = [column[start:stop] if self._batched else column for column in columns]
            yield pb_utils.InferenceResponse(
                [pb_utils.Tensor(*named) for named in zip(self._outputs, pieces, strict=True)]
            )
            start = stop


def _load(file: pathlib.Path, device: torch.device) -> torch.nn.Module:
    """The module of the file's one class that is a torch.nn.Module, or of its PyTorchModel."""
    spec = importlib.util.spec_from_file_location("penstock_pytorch_model", file)
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    classes = [
        kind
        for _, kind in inspect.getmembers(source, inspect.isclass)
        if issubclass(kind, torch.nn.Module) and kind.__module__ == source.__name__
    ]
    chosen = [kind for kind in classes if kind.__name__ == "PyTorchModel"] or classes
    if len(chosen) != 1:
        names = ", ".join(kind.__name__ for kind in chosen) or "none"
        raise ValueError(f"{file.name} must have one torch.nn.Module, or call it PyTorchModel; it has {names}")
    model = chosen[0]()
    weights = file.with_suffix(".pt")
    if weights.exists():
        model.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
    return model.to(device).eval()
