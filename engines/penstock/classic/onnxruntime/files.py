"""The files of an ONNX model, and that none of them lies outside its folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path, not_found
from penstock.classic.onnxruntime.options import load_onnxruntime

FILENAME = "model.onnx"
_IN_MEMORY = "add_external_initializers_from_files_in_memory"


def model_file(config: ModelConfig, version_folder: Path) -> Path:
    """`default_model_filename` (model.onnx) in the version's folder, or `model.onnx` in the folder of that name.

    Raises ValueError when there is none, or when its name leads out of the version's folder.
    """
    path = model_path(config, version_folder, FILENAME)
    if path.is_dir():
        path /= FILENAME
    if not path.is_file():
        raise not_found(config, version_folder, path)
    return path


def external_data(path: Path, folder: Path) -> list[str]:
    """The files that the model in `path` reads tensors from, as it names them. Raises ValueError when one is outside
    `folder`.

    A model comes with a path for each tensor that lies beside it, and may have been uploaded: without this check, it
    could be made of any file that the server may read.
    """
    onnx = load_onnxruntime("onnx")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:
        raise ValueError(f"'{path.name}' is not an ONNX model: {error}") from error
    places = sorted({place for tensor in _tensors(model) for place in _locations(tensor)})
    for location in places:
        if not _is_below(folder, path.parent, location):
            raise ValueError(f"'{path.name}' has external data outside the model's folder: '{location[:200]}'")
    return places


def map_linked(path: Path, locations: Iterable[str], options: Any) -> list[mmap]:
    """Gives sessions with these `options` the files that are links away from the model: ONNX Runtime itself reads only
    what lies beside it. The maps have to be kept until the last session is open."""
    names, maps = list[str](), list[mmap]()
    for location in locations:
        data = path.parent / location
        if data.is_file() and data.stat().st_size and not data.resolve().is_relative_to(path.resolve().parent):
            with data.open("rb") as file:
                maps.append(mmap(file.fileno(), 0, access=ACCESS_READ))
            names.append(location)
    if names and hasattr(options, _IN_MEMORY):  # versions that lack it follow links
        getattr(options, _IN_MEMORY)(names, maps, [len(mapped) for mapped in maps])
    return maps


def _is_below(folder: Path, start: Path, location: str) -> bool:
    """Links are the repository's to judge, but behind one of them `..` is another folder than it seems."""
    if ".." in Path(location).parts:
        return (start / location).resolve().is_relative_to(folder.resolve())
    return not Path(location).is_absolute()


def _locations(tensor: Any) -> Iterator[str]:
    # whatever data_location says: a reader may go by either
    return (entry.value for entry in tensor.external_data if entry.key == "location")


def _tensors(model: Any) -> Iterator[Any]:
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)
        yield from _attribute_tensors(function.attribute_proto)
    for training in model.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    yield from _sparse_tensors(graph.sparse_initializer)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield from _attribute_tensors(node.attribute)


def _attribute_tensors(attributes: Any) -> Iterator[Any]:
    for attribute in attributes:
        yield attribute.t
        yield from attribute.tensors
        yield from _sparse_tensors((attribute.sparse_tensor, *attribute.sparse_tensors))
        for graph in (attribute.g, *attribute.graphs):
            yield from _graph_tensors(graph)


def _sparse_tensors(tensors: Any) -> Iterator[Any]:
    for tensor in tensors:
        yield tensor.values
        yield tensor.indices
