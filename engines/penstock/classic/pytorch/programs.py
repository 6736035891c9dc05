"""Loaded models of each format, behind one interface."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.classic.described import DescribedModel, DescribedTensor
from penstock.classic.pytorch import values
from penstock.classic.pytorch.binding import DICTIONARY, Argument
from penstock.classic.pytorch.files import Format
from penstock.classic.pytorch.library import explain, load_torch

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
        self.arguments = [_argument(found) for found in schema.arguments[1:]]

    def run(self, arguments: list[Any]) -> Any:
        return self._module(*arguments)


def _argument(found: Any) -> Argument:
    kind = str(found.type)
    has_default = found.has_default_value()
    return Argument(found.name, _TYPES.get(kind, kind), has_default, found.default_value if has_default else None)


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
    found = node.meta["val"]
    if not isinstance(found, load_torch().Tensor):
        raise ValueError(f"'{name}' of the exported program is a {type(found).__name__}; only tensors are supported")
    shape = tuple(dim if isinstance(dim, int) else -1 for dim in found.shape)
    return DescribedTensor(name, values.datatype(found.dtype), shape)


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
