"""A language model as Optimum exports it for OpenVINO: a graph with its weights, beside config.json and a tokenizer."""

from __future__ import annotations

from pathlib import Path

from penstock.engines.formats.model_files import has_weights, real_path

_GRAPH = "openvino_model.xml"


def exported_graph(folder: Path) -> Path | None:
    """None where there is none, and where the folder has the same weights in safetensors."""
    path = folder / _GRAPH
    return path if path.is_file() and not has_weights(folder) else None


def graph_key(graph: Path) -> str:
    """Of what the files are now: others at the same place have another size or time."""
    stats = [(path, path.stat()) for path in (real_path(graph), weights_of(real_path(graph)))]
    return repr([(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats])


def weights_of(graph: Path) -> Path:
    return graph.with_suffix(".bin")
