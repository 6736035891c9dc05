"""A serialized pipeline: its file or its program, what it says of its inputs and outputs (DALI's Python module does not
tell), and the configuration filled from it and checked against it by the rules of Triton's backend.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from penstock.classic.frameworks import load_package
from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput, datatype_name, datatype_value
from penstock.classic.model_files import model_path
from penstock.classic.parameters import strings

_OPERATOR = re.compile(r"Error in \w+ operator `(?:nvidia\.dali\.)?(.*?)`")
_ENCOUNTERED = re.compile(r"encountered:\s*(.*?)\s*(?:Current pipeline object|Stacktrace|$)", re.DOTALL)
_PLACES = re.compile(r'^Assert on ".*?" failed: |\[\S+:\d+\]\s*', re.DOTALL)
_PATHS = re.compile(r"/[^\s\"';]*/")


def load_dali(module: str = "nvidia.dali") -> Any:
    """The module. Raises ValueError that says how to install it."""
    return load_package(module, "DALI pipelines", "'penstock-server[dali]'")


def explain(error: Exception) -> str:
    """A text without the pipeline's source, places in DALI's own, and folders of this machine."""
    text = str(error)
    operator, cause = _OPERATOR.search(text), _ENCOUNTERED.search(text)
    message = _PATHS.sub("", _PLACES.sub("", cause.group(1) if cause else text))
    prefix = f"{operator.group(1)}: " if operator else ""
    return prefix + " ".join(message.split())[:400]


_EXTERNAL_SOURCES = frozenset({"ExternalSource", "_ExternalSource", "external_source"})
_INPUT_OPERATORS = ("inputs__", "experimental__inputs__")
"""Those that requests feed, too, and that give many batches for one."""
_DATATYPES = (
    *("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BOOL"),
)
"""In the order of DALI's enum."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_FIELDS: dict[str, list[tuple[str, int, Any, bool]]] = {
    "Argument": [("name", 1, _FIELD.TYPE_STRING, False), ("integer", 4, _FIELD.TYPE_INT64, False)],
    "Tensor": [
        ("name", 1, _FIELD.TYPE_STRING, False),
        ("datatype", 5, _FIELD.TYPE_INT32, False),
        ("dimensions", 6, _FIELD.TYPE_INT32, False),
    ],
    "Operator": [
        ("name", 1, _FIELD.TYPE_STRING, False),
        ("outputs", 3, "Tensor", True),
        ("arguments", 4, "Argument", True),
    ],
    "Pipeline": [
        ("batch_size", 2, _FIELD.TYPE_INT32, False),
        ("operators", 5, "Operator", True),
        ("outputs", 7, "Tensor", True),
    ],
}
"""The part of DALI's messages that is read here: names of our own, with DALI's numbers."""


@dataclass(frozen=True, slots=True)
class PipelineTensor:
    name: str
    datatype: str
    """Empty: the pipeline does not say."""
    rank: int | None
    """Without the batch dimension."""


@dataclass(frozen=True, slots=True)
class Definition:
    batch_size: int
    inputs: tuple[PipelineTensor, ...]
    outputs: tuple[PipelineTensor, ...]


def read_definition(serialized: bytes) -> Definition:
    """Raises ValueError when this is no pipeline, or one with inputs that cannot be fed here."""
    pipeline = _message_class()()
    try:
        pipeline.ParseFromString(serialized)
    except DecodeError as error:
        raise ValueError("the file is no serialized DALI pipeline") from error
    if not pipeline.operators or not pipeline.outputs:
        raise ValueError("the file is no serialized DALI pipeline")
    for operator in pipeline.operators:
        if operator.name.startswith(_INPUT_OPERATORS):
            raise ValueError(f"the pipeline's {operator.name} is not supported: inputs must be external_source")
    inputs = [_input(operator) for operator in pipeline.operators if operator.name in _EXTERNAL_SOURCES]
    outputs = [_tensor(output.name, output.datatype, output.dimensions) for output in pipeline.outputs]
    return Definition(pipeline.batch_size, tuple(inputs), tuple(outputs))


def _input(operator: Any) -> PipelineTensor:
    arguments = {argument.name: argument.integer for argument in operator.arguments}
    return _tensor(operator.outputs[0].name, arguments.get("dtype", -1), arguments.get("ndim", -1))


def _tensor(name: str, datatype: int, rank: int) -> PipelineTensor:
    known = 0 <= datatype < len(_DATATYPES)
    return PipelineTensor(name, _DATATYPES[datatype] if known else "", rank if rank >= 0 else None)


@cache
def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="penstock/dali.proto", package="penstock.dali", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            entry = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                entry.type, entry.type_name = _FIELD.TYPE_MESSAGE, f".penstock.dali.{kind}"
            else:
                entry.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.dali.Pipeline"))


def complete(config: ModelConfig, definition: Definition) -> None:
    """Inputs by their names, outputs by their places; the batch size is the pipeline's if there is none.

    Raises ValueError when neither the pipeline nor the configuration says what is needed.
    """
    config.max_batch_size = config.max_batch_size or definition.batch_size
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()
    inputs = {tensor.name: tensor for tensor in config.input}
    for known in definition.inputs:
        _fill(config, "input", inputs.get(known.name) or config.input.add(name=known.name), known)
    split = split_outputs(config)
    for place, known in enumerate(definition.outputs):
        entry = config.output[place] if place < len(config.output) else config.output.add(name=known.name)
        _fill(config, "output", entry, _answered(known, entry.name in split))


def _fill(config: ModelConfig, kind: str, tensor: ModelInput | ModelOutput, known: PipelineTensor) -> None:
    if not tensor.data_type and known.datatype:
        tensor.data_type = datatype_value(known.datatype)
    if not tensor.dims and known.rank is not None:
        if isinstance(tensor, ModelInput) and known.rank:
            # samples of other shapes go into one batch, as with Triton
            tensor.allow_ragged_batch = True
        tensor.dims.extend([-1] * known.rank or [1])
        if not known.rank:
            tensor.reshape.SetInParent()
    if not tensor.data_type or not tensor.dims:
        raise ValueError(
            f"the pipeline of model '{config.name}' does not say what its {kind} '{known.name}' is: give it a dtype and"
            " ndim there, or list it in config.pbtxt"
        )


def check(config: ModelConfig, definition: Definition) -> None:
    """Raises ValueError when the configuration is not one of this pipeline."""
    if config.model_transaction_policy.decoupled:
        raise ValueError(f"model '{config.name}' must not be decoupled: a pipeline answers a request once")
    inputs = {tensor.name: tensor for tensor in definition.inputs}
    for tensor in config.input:
        if tensor.name not in inputs:
            raise ValueError(
                f"the pipeline of model '{config.name}' has no input '{tensor.name}', only {_names(inputs)}"
            )
        _check_tensor(config, "input", tensor, inputs.pop(tensor.name))
    if inputs:
        raise ValueError(
            f"the pipeline of model '{config.name}' has inputs that the configuration lacks: {_names(inputs)}"
        )
    if len(config.output) != len(definition.outputs):
        raise ValueError(
            f"the pipeline of model '{config.name}' has {len(definition.outputs)} outputs, the configuration"
            f" {len(config.output)}"
        )
    split = split_outputs(config)
    for output, known in zip(config.output, definition.outputs, strict=True):
        _check_tensor(config, "output", output, _answered(known, output.name in split))


def split_outputs(config: ModelConfig) -> frozenset[str]:
    """Outputs whose samples are split along their first dimension, which is then the batch's: the parameter
    `split_along_outer_axis`. Raises ValueError when it names none of the outputs."""
    names = frozenset(filter(None, strings(config).get("split_along_outer_axis", "").split(":")))
    if unknown := sorted(names - {tensor.name for tensor in config.output}):
        raise ValueError(f"parameter 'split_along_outer_axis' names '{unknown[0][:100]}', which is not an output")
    return names


def _answered(known: PipelineTensor, is_split: bool) -> PipelineTensor:
    return replace(known, rank=known.rank - 1) if is_split and known.rank else known


def is_encoded(tensor: ModelInput) -> bool:
    """BYTES[1]: each element is the file of one sample, and they may have different lengths."""
    return datatype_name(tensor.data_type) == "BYTES"


def _check_tensor(config: ModelConfig, kind: str, tensor: ModelInput | ModelOutput, known: PipelineTensor) -> None:
    if isinstance(tensor, ModelInput) and tensor.allow_ragged_batch and is_encoded(tensor):
        raise ValueError(
            f"input '{tensor.name}' of model '{config.name}' is TYPE_STRING and needs no allow_ragged_batch"
        )
    datatype = datatype_name(tensor.data_type)
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    if kind == "input" and datatype == "BYTES":
        if list(tensor.dims) != [1] or known.datatype not in ("", "UINT8"):
            raise ValueError(
                f"input '{tensor.name}' of model '{config.name}' can be a TYPE_STRING for UINT8, with dims [ 1 ]"
            )
        return
    if known.datatype and datatype != known.datatype:
        raise ValueError(
            f"unable to load model '{config.name}', configuration expects datatype TYPE_{datatype} for {kind}"
            f" '{tensor.name}', model provides TYPE_{known.datatype}"
        )
    if known.rank is not None and len(dims) != known.rank:
        raise ValueError(
            f"{kind} '{tensor.name}' of model '{config.name}' has {known.rank} dimensions in the pipeline, and"
            f" {len(dims)} in the configuration"
        )


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


FILENAME = "model.dali"
PROGRAM = "dali.py"
_LIMIT_SECONDS = 120
_SERIALIZE = """
import importlib.util, sys
from nvidia.dali._utils.autoserialize import invoke_autoserialize
spec = importlib.util.spec_from_file_location("autoserialized", sys.argv[1])
module = sys.modules["autoserialized"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
invoke_autoserialize(module, sys.argv[2])
"""


def serialized_pipeline(config: ModelConfig, version_folder: Path) -> bytes:
    """Of `model.dali`, or of the function that `dali.py` marks with `@autoserialize`. In a thread.

    Raises ValueError when there is none, or its program fails.
    """
    path = model_path(config, version_folder, FILENAME, PROGRAM)
    return _made_by(path) if path.suffix == ".py" else path.read_bytes()


def _made_by(program: Path) -> bytes:
    """In a process of its own, for the program may do anything."""
    load_dali()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / FILENAME
        process = subprocess.Popen(
            [sys.executable, "-c", _SERIALIZE, str(program), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{program.name} made no pipeline within {_LIMIT_SECONDS} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode or not target.is_file():
            last = errors.strip().splitlines()[-1:] or ["it ended early"]
            raise ValueError(f"{program.name} made no pipeline: {last[0].replace(str(program), program.name)[:400]}")
        return target.read_bytes()
