"""Model files in Ollama's words: size, digest, family, parameters and their type."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.apis.ollama.model_files import ModelFiles, read_model_files
from support.gguf import write_gguf
from support.models import edit_config, make_model
from support.quantized import bnb_nf4, fp8, gptq, round_to_levels, write_quantized

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def packed_gptq(name: str, matrix: Any) -> Any:
    levels = round_to_levels(matrix, 4, symmetric=True)
    return gptq(levels), levels.floats()


PACKS: dict[str, tuple[dict[str, Any], Any]] = {
    "INT4": (GPTQ, packed_gptq),
    "NF4": (NF4, lambda name, matrix: bnb_nf4(matrix, nested=True, block=32)),
    "FP8": (FP8, lambda name, matrix: fp8(matrix, matrix.shape)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def test_a_folder_of_floats(folder: Path) -> None:
    files = read_model_files(folder)
    weights = (folder / "model.safetensors").stat()
    assert (files.size, files.modified) == (weights.st_size, weights.st_mtime)
    assert weights.st_size * 0.9 < 4 * files.parameters < weights.st_size
    assert (files.format, files.level, files.details["families"]) == ("safetensors", "F32", ["llama"])
    assert files.info["general.architecture"] == "llama"
    assert files.info["general.parameter_count"] == files.parameters
    assert files.info["llama.block_count"] > 0


@pytest.mark.parametrize("level", PACKS)
def test_weights_are_counted_and_not_the_numbers_that_hold_them(level: str, folder: Path, tmp_path: Path) -> None:
    config, pack = PACKS[level]
    target = write_quantized(folder, tmp_path / "model", config, pack)
    files, floats = read_model_files(target), read_model_files(folder)
    assert files.level == level
    assert files.parameters == floats.parameters
    assert files.size < floats.size


def test_a_gguf_file_says_it_itself(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf", lambda name: "Q8_0", general__file_type=7)
    files = read_model_files(tmp_path)
    assert (files.format, files.family, files.level) == ("gguf", "llama", "Q8_0")
    assert files.parameters == read_model_files(folder).parameters
    assert files.info["llama.block_count"] > 0
    assert "tokenizer.ggml.tokens" not in files.info


def test_the_digest_is_that_of_the_files_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    same = Path(shutil.copytree(folder, tmp_path / "same"))
    digest = read_model_files(folder).digest
    assert len(digest) == 64
    assert read_model_files(same).digest == digest
    edit_config(same, rope_theta=12345.0)
    assert read_model_files(same).digest != digest


def test_a_license_beside_the_weights(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert read_model_files(copy).license == ""
    (copy / "LICENSE.txt").write_text("Do what you like.")
    assert read_model_files(copy).license == "Do what you like."
    (copy / "LICENSE.txt").write_text("x" * 300_000)
    assert read_model_files(copy).license == ""


def test_of_files_that_cannot_be_read_little_is_known(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "model.safetensors").write_bytes(b"no weights")
    files = read_model_files(copy)
    assert (files.size, files.family, files.parameters) == (10, "llama", 0)
    (copy / "config.json").write_text("{")
    assert read_model_files(copy).family == ""
    shutil.rmtree(copy)
    assert read_model_files(copy) == ModelFiles()


@pytest.mark.parametrize(("parameters", "text"), [(0, ""), (999, "999"), (7_200_000, "7.2M"), (1_540_000_000, "1.5B")])
def test_sizes_as_people_say_them(parameters: int, text: str) -> None:
    assert ModelFiles(parameters=parameters).details["parameter_size"] == text
