"""GGUF files: what is written is read, and what is damaged is refused."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.errors import EngineError, PenstockError, UnsupportedError
from penstock.engines.formats.gguf.container import _BLOCKS, StoredBlocks, read_gguf
from penstock.engines.formats.gguf.tensors import BlockTensor


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_string("text", "vers\u00e9")
    writer.add_bool("yes", True)
    writer.add_int64("negative", -5)
    writer.add_float32("half", 0.5)
    writer.add_array("words", ["a", "", "b\u00e9"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("switches", [True, False])
    writer.add_tensor("small", np.arange(6, dtype=np.float32))
    writer.add_tensor("large", np.arange(64 * 4, dtype=np.float16).reshape(4, 64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "x.gguf"


def test_everything_is_read(file: Path) -> None:
    found = read_gguf(file)
    assert found.metadata == {
        "general.architecture": "llama",
        "text": "vers\u00e9",
        "yes": True,
        "negative": -5,
        "half": 0.5,
        "words": ["a", "", "b\u00e9"],
        "numbers": [1, -2, 3],
        "switches": [True, False],
    }
    small, large = found.tensors["small"], found.tensors["large"]
    assert (small.dtype, small.shape, large.dtype, large.shape) == ("F32", (6,), "F16", (4, 64))
    assert small.rows.reshape(-1).view(np.float32).tolist() == list(range(6))
    assert large.rows.view(np.float16)[1].tolist() == list(range(64, 128))


@settings(max_examples=300)
@given(st.data())
def test_damage_is_refused_or_read_but_never_a_crash(
    damaged: tuple[bytes, Path],
    data: st.DataObject,
) -> None:
    content, path = damaged
    broken = bytearray(content[: data.draw(st.integers(0, len(content)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if broken:
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(broken)
    with suppress(PenstockError):
        read_gguf(path)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    folder = tmp_path_factory.mktemp("damaged")
    return file.__wrapped__(folder).read_bytes(), folder / "broken.gguf"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(20), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "cannot be read as GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "beyond the end"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QsI", 1, b"k", 77), "unknown type 77"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QsIIQ", 1, b"k", 9, 9, 1),
            "an array of the type 9",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QsIIQ", 1, b"k", 9, 4, 2**61),
            "cannot be read as GGUF",
        ),
    ],
)
def test_no_gguf(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=message):
        read_gguf(path)


def test_other_versions_and_types_are_named(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b"GGUF\x03", b"GGUF\x01"))
    with pytest.raises(UnsupportedError, match="version 1"):
        read_gguf(file)
    name = content.index(b"small") + len(b"small") + 4 + 8
    file.write_bytes(content[:name] + struct.pack("<I", 16) + content[name + 4 :])
    with pytest.raises(UnsupportedError, match=r"tensor small has ggml's type 16"):
        read_gguf(file)


@pytest.mark.parametrize("number", sorted(_BLOCKS))
def test_block_formats(number: int) -> None:
    name, elements, size = _BLOCKS[number]
    kind = GGMLQuantizationType(number)
    assert (kind.name, GGML_QUANT_SIZES[kind]) == (name, (elements, size))
    rows = np.random.default_rng(number).integers(0, 100, (6, 2 * size), dtype=np.uint8)
    tensor = BlockTensor(name, (6, 2 * elements), rows, np.array([5, 4, 3, 2, 1, 0]))
    with np.errstate(all="ignore"):
        wanted = dequantize(rows, kind)[::-1]
    if name not in ("F32", "F16", "BF16"):
        np.testing.assert_array_equal(tensor.f32(), wanted)
        np.testing.assert_array_equal(tensor.rows_f32(2, 4), wanted[2:4])


def test_blocks_have_to_fit(file: Path) -> None:
    blocks = read_gguf(file).tensors["large"]
    assert isinstance(blocks, StoredBlocks)
    content = file.read_bytes()
    file.write_bytes(content[: -len(blocks.rows.tobytes())])
    with pytest.raises(EngineError, match="does not fit its bytes"):
        read_gguf(file)
