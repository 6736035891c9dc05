from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.openvino.checkpoint import Checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_of_every_dtype_are_read_whole_and_by_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.randn(5, 3).to(dtype)
    save_file({"a": tensor, "b": tensor[0].clone()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint) == {"a", "b"}
    assert (checkpoint["a"].f32() == tensor.float().numpy()).all()
    assert (checkpoint["a"].rows_f32(1, 3) == tensor[1:3].float().numpy()).all()
    assert (checkpoint["b"].f32() == tensor[0].float().numpy()).all()
    assert checkpoint.num_bytes == 18 * tensor.element_size()
    checkpoint.release_pages()
    assert (checkpoint["a"].f32() == tensor.float().numpy()).all()


def test_missing_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match="no tensor b"):
        Checkpoint(tmp_path)["b"]


def test_other_formats_are_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="safetensors only"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedError, match=r"safetensors only; pytorch_model.bin is a pickle"):
        Checkpoint(tmp_path)


def test_unknown_dtype(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="tensor a has dtype I64"):
        Checkpoint(tmp_path)


def header(entry: object, data: bytes = b"\0" * 8) -> bytes:
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\0\0",
        b"\xff" * 16,
        (10**6).to_bytes(8, "little") + b"{}",
        b"\2\0\0\0\0\0\0\0[]",
        b"\2\0\0\0\0\0\0\0{]",
        header(None),
        header({"dtype": "F32", "shape": [2]}),
        header({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}),
        header({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}),
        header({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}),
        header({"dtype": "F32", "shape": [2], "data_offsets": [0]}),
        header({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}),
    ],
)
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"model\.safetensors cannot be read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../../etc/passwd"}}',
    ],
)
def test_damaged_index(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(EngineError, match=r"model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(EngineError, match=r"model-1\.safetensors cannot be read"):
        Checkpoint(tmp_path)


def test_experts_without_bytes(tmp_path: Path) -> None:
    """Any number of them fits into a file."""
    name = "model.layers.0.mlp.experts.down_proj"
    text = json.dumps({name: {"dtype": "F32", "shape": [1 << 20, 0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert list(Checkpoint(tmp_path)) == [name]


def test_data_that_is_not_aligned(tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    text += b" " * (1 + -len(text) % 8)
    data = np.array([1.5, -2.5], np.float32).tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert Checkpoint(tmp_path)["a"].f32().tolist() == [1.5, -2.5]
