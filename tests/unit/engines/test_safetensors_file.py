"""The header of a safetensors file, whatever the types of its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engines.errors import EngineError
from penstock.engines.formats.safetensors_file import TensorHeader, read_header


def test_shapes_of_types_that_are_not_loaded(tmp_path: Path) -> None:
    tensors = {
        "packed": torch.zeros(4, 2, dtype=torch.int32),
        "small": torch.zeros(3, 5, dtype=torch.float8_e4m3fn),
        "half": torch.zeros(7, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    expected = {
        "packed": TensorHeader("I32", (4, 2), 32),
        "small": TensorHeader("F8_E4M3", (3, 5), 15),
        "half": TensorHeader("BF16", (7,), 14),
    }
    assert read_header(tmp_path / "x.safetensors") == expected


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": 8, "shape": [8], "data_offsets": [0, 8]},
        {"dtype": "U8", "shape": [-8], "data_offsets": [0, 8]},
        {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
        {"dtype": "U8", "shape": [8]},
    ],
)
def test_headers_that_do_not_describe_the_file(entry: object, tmp_path: Path) -> None:
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(EngineError, match=r"x\.safetensors cannot be read as safetensors"):
        read_header(tmp_path / "x.safetensors")
