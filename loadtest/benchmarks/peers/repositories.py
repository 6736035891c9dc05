"""The models of the tensor tables, in the layouts that servers read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.peers.peers_folder import FOREIGN, PeersFolder

_BATCHES = {"add_sub": 64, "identity": 32}
_INPUTS = {"add_sub": ("INPUT0", "INPUT1"), "identity": ("INPUT0",)}
_OUTPUTS = {"add_sub": ("OUTPUT0", "OUTPUT1"), "identity": ("OUTPUT0",)}
_DIMS = {"add_sub": (16,), "identity": (3, 224, 224)}
_CLASSES = {"add_sub": "AddSub", "identity": "Identity"}
_QUEUE_DELAY_US = 100


def make_repositories(peers_folder: PeersFolder, *, onnx: bool) -> None:
    """Made again each time: they are small, and Triton's backend writes into them. `onnx`: also with that runtime, for
    which the package must be here."""
    for name in ("triton", "mlserver", "onnx"):
        shutil.rmtree(peers_folder.repository(name), ignore_errors=True)
    for model in _BATCHES:
        python = _model(peers_folder, "triton", model, "python")
        shutil.copy(FOREIGN / f"triton_{model}.py", python / "model.py")
        settings = {"name": model, "implementation": f"mlserver_models.{_CLASSES[model]}"}
        folder = peers_folder.repository("mlserver") / model
        folder.mkdir(parents=True)
        (folder / "model-settings.json").write_text(json.dumps(settings))
        if onnx:
            (_model(peers_folder, "onnx", model, "onnxruntime") / "model.onnx").write_bytes(_graph(model))


def _model(peers_folder: PeersFolder, repository: str, model: str, backend: str) -> Path:
    """The folder of the model's one version, beside its configuration."""
    folder = peers_folder.repository(repository) / model
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_config(model, backend))
    return folder / "1"


def _config(model: str, backend: str) -> str:
    """One instance, and a short wait for a batch, everywhere."""
    dims = ", ".join(map(str, _DIMS[model]))
    lines = [f'backend: "{backend}"', f"max_batch_size: {_BATCHES[model]}"]
    for kind, names in (("input", _INPUTS[model]), ("output", _OUTPUTS[model])):
        lines += [f'{kind} [ {{ name: "{name}" data_type: TYPE_FP32 dims: [ {dims} ] }} ]' for name in names]
    lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_DELAY_US} }}")
    lines.append("instance_group [ { count: 1 kind: KIND_CPU } ]")
    if backend == "onnxruntime":
        lines.append('parameters { key: "intra_op_thread_count" value { string_value: "1" } }')
    return "\n".join(lines) + "\n"


def _graph(model: str) -> bytes:
    from onnx import TensorProto, ValueInfoProto, helper

    def floats(name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *_DIMS[model]])

    inputs, outputs = _INPUTS[model], _OUTPUTS[model]
    operators = ("Add", "Sub") if model == "add_sub" else ("Identity",)
    nodes = [helper.make_node(name, inputs, [output]) for name, output in zip(operators, outputs, strict=True)]
    graph = helper.make_graph(nodes, model, [*map(floats, inputs)], [*map(floats, outputs)])
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx_model.ir_version = 8  # the oldest that has this opset: runtimes are strict
    return bytes(onnx_model.SerializeToString())
