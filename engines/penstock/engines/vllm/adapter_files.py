"""What an adapter's folder must hold before vLLM gets to see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.engines.formats.adapter_files import WEIGHTS_FILE, read_settings
from penstock.engines.formats.safetensors_file import Shape, read_header
from penstock.engines.formats.text_part import text_name

_PART = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


def check_adapter(folder: Path, model_dir: Path, max_rank: int) -> None:
    """Raises InvalidRequestError unless the files are there and their shapes fit the model's.

    vLLM copies an adapter's matrices into larger buffers, so that one for a smaller model would be taken in silence.
    """
    read_settings(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise InvalidRequestError(f"the adapter has no {WEIGHTS_FILE}")
    try:
        parts = [(name, shape, match) for name, shape in _matrices(path) if (match := _PART.fullmatch(name))]
    except EngineError as e:
        raise InvalidRequestError(e.message) from e
    if not parts:
        raise InvalidRequestError(f"there is no matrix of an adapter in {WEIGHTS_FILE}")
    files = sorted(model_dir.glob("*.safetensors"))
    base = {_usual_name(name): shape for file in files for name, shape in _matrices(file)}
    for name, shape, match in parts:
        rank, width = shape if match["side"] == "A" else shape[::-1]
        if rank > max_rank:
            raise InvalidRequestError(f"{name} has rank {rank}, more than max_lora_rank={max_rank}")
        # A is [rank, in] and B [out, rank] beside a weight [out, in]; vLLM says whether it knows the module
        weight = base.get(_usual_name(match["module"] + ".weight"))
        if weight is not None and width != weight[match["side"] == "A"]:
            raise InvalidRequestError(f"{name} is {list(shape)}, which does not fit the model's {list(weight)}")


def _usual_name(name: str) -> str:
    """Whole models that also take images, and adapters for them, name the language model's tensors in several ways."""
    return text_name(name) or name


def _matrices(path: Path) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the matrices in a safetensors file; packed weights have no true shape."""
    for name, found in read_header(path).items():
        if len(found.shape) == 2 and "F" in found.dtype:
            yield name, found.shape
