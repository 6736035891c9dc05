"""Loaded models of each of PyTorch's formats behind one interface, and how configured tensors are bound to them.

The conventions are those of Triton's PyTorch backend: names of arguments, `<anything>__<index>`, a dictionary, or else
the order of the configuration.
"""

from __future__ import annotations

import json
import re
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from penstock.classic.frameworks import DescribedModel, DescribedTensor, to_bytes, to_text
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path
from penstock.classic.pytorch.options import explain, load_torch
from penstock.classic.tensors import NUMPY_TYPES, Array, datatype_called
from penstock.engines.errors import EngineError

FILENAMES = ("model.pt", "model.pt2")


class Format(Enum):
    TORCHSCRIPT = "TorchScript"
    EXPORTED = "torch.export"
    COMPILED = "AOTInductor"


def model_file(config: ModelConfig, version_folder: Path) -> tuple[Path, Format]:
    """Raises ValueError when there is no file, or it is none that is served."""
    path = model_path(config, version_folder, *FILENAMES)
    return path, _format(path)


def _format(path: Path) -> Format:
    """By the names in the archive; nothing is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile):
        raise ValueError(
            f"'{path.name}' is neither TorchScript (torch.jit.save) nor a .pt2 archive (torch.export.save, AOTInductor)"
        ) from None
    if any(name.startswith("data/aotinductor/") for name in names):
        return Format.COMPILED
    if any(name.startswith("models/") for name in names) or "serialized_exported_program.json" in names:
        return Format.EXPORTED
    if any(name.startswith("code/") for name in names):
        return Format.TORCHSCRIPT
    raise ValueError(
        f"'{path.name}' is what torch.save writes: weights or a pickled module, which are not loaded. Save the model"
        ' with torch.jit.save or torch.export.save, or give its class in a model.py with runtime: "model.py"'
    )


_INDEXED = re.compile(r".+__(\d{1,4})", re.ASCII)

DICTIONARY = "Dict[str, Tensor]"
STRINGS = "List[str]"


@dataclass(frozen=True, slots=True)
class Argument:
    name: str
    type: str
    """`Tensor`, DICTIONARY, STRINGS, or another that no request can carry."""
    optional: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class InputBinding:
    order: tuple[str | None, ...]
    """Of each argument, the input that it takes; None: its default."""
    arguments: Sequence[Argument]
    dictionary: bool = False
    """All inputs are one argument, by their names."""

    def values(self, feed: Mapping[str, Any]) -> list[Any]:
        """The arguments of one execution, by position. `feed` lacks no input but optional ones."""
        if self.dictionary:
            return [dict(feed)]
        return [
            argument.default if name is None else feed.get(name, argument.default)
            for name, argument in zip(self.order, self.arguments, strict=True)
        ]


def bind_inputs(names: Sequence[str], optional: Sequence[str], arguments: Sequence[Argument]) -> InputBinding:
    """`optional`: those of the names that a request may leave out. Raises ValueError when they do not fit."""
    if len(arguments) == 1 and arguments[0].type == DICTIONARY:
        return InputBinding((), arguments, dictionary=True)
    by_name = {argument.name: index for index, argument in enumerate(arguments)}
    if all(name in by_name for name in names):
        places = {by_name[name]: name for name in names}
    elif (indices := _indices(names)) is not None:
        places = dict(zip(indices, names, strict=True))
    else:
        places = dict(enumerate(names))
    if (extra := max(places, default=0)) >= max(1, len(arguments)):
        raise ValueError(
            f"input '{places[extra]}' would be argument {extra} of forward(), which has {len(arguments)}: name inputs"
            f" as its arguments ({', '.join(by_name) or 'none'}), or <name>__<index>"
        )
    for index, argument in enumerate(arguments):
        name = places.get(index)
        if name is None and not argument.optional:
            raise ValueError(f"argument '{argument.name}' of forward() has no input in the configuration")
        if name is not None and name in optional and not argument.optional:
            raise ValueError(f"input '{name}' is optional, and argument '{argument.name}' of forward() is not")
        if name is not None and argument.type not in ("Tensor", STRINGS):
            raise ValueError(f"argument '{argument.name}' of forward() is a {argument.type}, which no input can be")
    return InputBinding(tuple(places.get(index) for index in range(len(arguments))), arguments)


def bind_outputs(names: Sequence[str]) -> dict[str, int]:
    """The place of each output in a tuple of results. A dictionary of results is read by name instead."""
    indices = _indices(names)
    return dict(zip(names, range(len(names)) if indices is None else indices, strict=True))


def results(value: Any, places: Mapping[str, int]) -> dict[str, Any]:
    """What a model gave, by output. Raises EngineError when it is too little."""
    if isinstance(value, Mapping):
        if missing := sorted(places.keys() - value.keys()):
            raise EngineError(f"the model gave no output '{missing[0]}', but {', '.join(map(str, value))}"[:400])
        return {name: value[name] for name in places}
    is_strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
    values = value if isinstance(value, tuple | list) and not is_strings else (value,)
    if (most := max(places.values(), default=0)) >= len(values):
        raise EngineError(f"the model gave {len(values)} outputs, and the configuration names output {most}")
    return {name: values[index] for name, index in places.items()}


def _indices(names: Sequence[str]) -> list[int] | None:
    """Of names that all end in `__<index>`, each with another one."""
    indices = [int(match.group(1)) for name in names if (match := _INDEXED.fullmatch(name))]
    return indices if len(indices) == len(names) == len(set(indices)) else None


_BF16 = NUMPY_TYPES["BF16"]


def datatype(dtype: Any) -> str:
    """`FP32` for torch.float32; what no request can carry stays in PyTorch's words."""
    return datatype_called(str(dtype).removeprefix("torch."))


def to_torch(array: Array, device: Any, *, shared: bool) -> Any:
    """A tensor on the device. `shared`: the array is not ours, and models may write to their inputs: it is copied."""
    torch = load_torch()
    if array.dtype == _BF16:
        return to_torch(array.view(np.int16), device, shared=shared).view(torch.bfloat16)
    if device.type != "cpu":
        return torch.tensor(array, device=device)
    return torch.from_numpy(array.copy() if shared or not array.flags.writeable else array)


def to_strings(name: str, array: Array) -> list[str]:
    """Row by row. Raises InvalidRequestError for what is not UTF-8."""
    texts: list[str] = to_text(name, array).ravel().tolist()
    return texts


def from_torch(name: str, tensor: Any) -> Array:
    """An array in main memory, which no later execution changes. Raises EngineError for what is no tensor."""
    torch = load_torch()
    if not isinstance(tensor, torch.Tensor):
        raise EngineError(f"the model gave a {type(tensor).__name__} for output '{name}', which is not a tensor")
    tensor = tensor.detach()
    # a copy on the CPU too: models may give a buffer that they go on writing to
    tensor = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.contiguous().view(torch.int16).numpy()).view(_BF16)
    return np.asarray(tensor.numpy())


def from_strings(name: str, value: Any, dims: Sequence[int], batched: bool) -> Array:
    """A list of strings in the output's shape. Raises EngineError when it does not fit."""
    if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise EngineError(f"the model gave no list of strings for output '{name}'")
    array = np.empty(len(value), np.object_)
    array[:] = value
    shape = (-1, *dims) if batched else tuple(dims)
    try:
        return to_bytes(array).reshape(shape)
    except ValueError:
        raise EngineError(f"the model gave {len(value)} strings for output '{name}' of the shape {shape}") from None


_TYPES = {"Dict(str, Tensor)": DICTIONARY, "Dict[str, Tensor]": DICTIONARY, "Optional[Tensor]": "Tensor"}
"""What TorchScript and its printed types call the same."""

_reading = threading.Lock()
"""torch.export reads one archive at a time: it raises in every other thread."""


class Program(Protocol):
    arguments: Sequence[Argument]
    described: DescribedModel | None
    """None: the file tells neither shapes nor types."""
    most_rows: int | None
    """The largest batch; None: the file says nothing of it."""

    def run(self, arguments: list[Any]) -> Any:
        """From any thread, in several at once."""
        ...


def load_program(path: Path, format: Format, device: Any) -> Program:
    """On the device (a torch.device). Raises ValueError."""
    makers = {Format.TORCHSCRIPT: TorchScript, Format.EXPORTED: Exported, Format.COMPILED: Compiled}
    try:
        return makers[format](path, device)
    except ValueError:
        raise
    except Exception as error:
        text = explain(error).replace(str(path), path.name)
        raise ValueError(f"'{path.name}' cannot be loaded: {text}") from error


class TorchScript:
    described = None
    most_rows = None

    def __init__(self, path: Path, device: Any) -> None:
        self._module = load_torch().jit.load(str(path), map_location=device).eval()
        schema = self._module.forward.schema
        self.arguments = [_argument(argument) for argument in schema.arguments[1:]]

    def run(self, arguments: list[Any]) -> Any:
        return self._module(*arguments)


def _argument(argument: Any) -> Argument:
    kind = str(argument.type)
    has_default = argument.has_default_value()
    return Argument(argument.name, _TYPES.get(kind, kind), has_default, argument.default_value if has_default else None)


class Exported:
    """A torch.export archive: its graph, run operator by operator."""

    def __init__(self, path: Path, device: Any) -> None:
        with _reading:
            program = load_torch("torch.export").load(str(path))
            if device.type != "cpu":
                program = load_torch("torch.export.passes").move_to_device_pass(program, device)
            self._module = program.module()
        self._positional, self.arguments = _arguments(program)
        self.described = _describe(program, [argument.name for argument in self.arguments])
        self.most_rows = _most_rows(program)

    def run(self, arguments: list[Any]) -> Any:
        count = self._positional
        keywords = {
            argument.name: value for argument, value in zip(self.arguments[count:], arguments[count:], strict=True)
        }
        return self._module(*arguments[:count], **keywords)


def _arguments(program: Any) -> tuple[int, list[Argument]]:
    """How many are positional, and all of them. Raises ValueError for those that are no tensors."""
    positional, keywords = program.call_spec.in_spec.children()
    if not all(spec.is_leaf() for spec in (*positional.children(), *keywords.children())):
        raise ValueError("the exported program has lists or dictionaries as arguments; only tensors are supported")
    count = positional.num_children
    names = list(program.module_call_graph[0].signature.forward_arg_names or ())
    # as it was exported, keywords in the order of the call
    names = [*(names[:count] or (f"INPUT__{index}" for index in range(count))), *(keywords.context or ())]
    return count, [Argument(name, "Tensor") for name in names]


@dataclass(frozen=True, slots=True)
class _Nodes:
    inputs: list[Any]
    outputs: list[Any]


def _nodes(program: Any) -> _Nodes:
    """The graph's nodes of what callers give and get."""
    signature = program.graph_signature
    by_name = {node.name: node for node in program.graph.nodes}
    if not all(isinstance(name, str) for name in (*signature.user_inputs, *signature.user_outputs)):
        raise ValueError("the exported program has inputs or outputs that are constants; only tensors are supported")
    return _Nodes([by_name[name] for name in signature.user_inputs], [by_name[name] for name in signature.user_outputs])


def _describe(program: Any, names: Sequence[str]) -> DescribedModel:
    nodes = _nodes(program)
    spec = program.call_spec.out_spec
    keys = spec.context if spec.type is dict else [f"OUTPUT__{index}" for index in range(len(nodes.outputs))]
    return DescribedModel(
        inputs=tuple(_tensor(name, node) for name, node in zip(names, nodes.inputs, strict=True)),
        outputs=tuple(_tensor(name, node) for name, node in zip(keys, nodes.outputs, strict=True)),
    )


def _tensor(name: str, node: Any) -> DescribedTensor:
    value = node.meta["val"]
    if not isinstance(value, load_torch().Tensor):
        raise ValueError(f"'{name}' of the exported program is a {type(value).__name__}; only tensors are supported")
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
    return DescribedTensor(name, datatype(value.dtype), shape)


def _most_rows(program: Any) -> int | None:
    """The upper bound of the first dimensions of the inputs, where they are variable."""
    bounds = []
    for node in _nodes(program).inputs:
        shape = node.meta["val"].shape
        if shape and not isinstance(shape[0], int):
            upper = program.range_constraints[shape[0].node.expr].upper
            bounds += [int(upper)] if upper.is_Integer else []
    return min(bounds, default=None)


class Compiled:
    """An AOTInductor package: machine code, with inputs and outputs in the order in which it was exported.

    It takes the types and shapes of what it gets for granted. With AOTI_RUNTIME_CHECK_INPUTS=1 in the environment it
    checks them, and then many a package refuses batches of one: it was compiled for two or more.
    """

    described = None
    most_rows = None

    def __init__(self, path: Path, device: Any) -> None:
        load = load_torch("torch._inductor").aoti_load_package
        self._package = load(str(path), device_index=-1 if device.type == "cpu" else device.index)
        _, spec = json.loads(self._package.loader.get_call_spec()[0])
        positional, keywords = spec["children_spec"]
        if keywords["children_spec"] or any(child["type"] for child in positional["children_spec"]):
            raise ValueError("the package has lists, dictionaries or keywords as arguments; only tensors are supported")
        self.arguments = [Argument(f"INPUT__{index}", "Tensor") for index in range(len(positional["children_spec"]))]

    def run(self, arguments: list[Any]) -> Any:
        return self._package(*arguments)
