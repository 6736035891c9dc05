"""What a folder's files say: where answers end, which files are the weights, and JSON as editors write it."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.model_files import eos_token_ids, has_weights, read_json, real_path, weight_files

ENDS = {"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": 0}}
"""As a fine-tuned chat model often has them: those of its base model."""
ADDED = {"added_tokens": [{"id": 7, "content": "<|im_end|>", "special": True}], "model": {"vocab": {"a": 0}}}
IN_VOCABULARY = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "<|im_end|>": 7}}}
UNIGRAM = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0], ["<|im_end|>", -2.0]]}}


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("generation", "model", "wanted"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 2}, (7, 8, 2)),
        ({"eos_token_id": 7}, {"eos_token_id": 7}, (7,)),
        ({}, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": None}, ()),
        (None, {"eos_token_id": [2, 100]}, (2,)),
        ({"eos_token_id": -1}, {}, ()),
        ({"eos_token_id": 1}, {"eos_token_id": 2, "text_config": {"eos_token_id": [2, 3]}}, (1, 2, 3)),
        (None, {"eos_token_id": 2, "text_config": None}, (2,)),
    ],
)
def test_ends_in_the_settings(
    generation: dict[str, Any] | None, model: dict[str, Any], wanted: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, {"config.json": model} | ({} if generation is None else {"generation_config.json": generation}))
    assert eos_token_ids(tmp_path, 100) == wanted


@pytest.mark.parametrize("value", ["2", 2.0, True, [[2]], {"id": 2}])
def test_ends_that_are_no_ids(value: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="which is not a token id"):
        eos_token_ids(write(tmp_path, {"config.json": {"eos_token_id": value}}), 100)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "tokenizer.json": ADDED}, 7),
        (
            {
                "tokenizer_config.json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}},
                "tokenizer.json": ADDED,
            },
            7,
        ),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "tokenizer.json": IN_VOCABULARY}, 7),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "tokenizer.json": UNIGRAM}, 2),
        ({"special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}}, "tokenizer.json": ADDED}, 7),
        (
            {
                "tokenizer_config.json": {"eos_token": None},
                "special_tokens_map.json": {"eos_token": "<|im_end|>"},
                "tokenizer.json": ADDED,
            },
            7,
        ),
        (
            {
                "tokenizer_config.json": {
                    "eos_token": "<|im_end|>",
                    "added_tokens_decoder": {"5": {"content": "<|im_start|>"}, "6": {"content": "<|im_end|>"}},
                },
                "tokenizer.json": {"model": {"vocab": {}}},
            },
            6,
        ),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "tokenizer.json": "{"}, None),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "tokenizer.json": {"model": {"vocab": [3]}}}, None),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, None),
        ({"tokenizer_config.json": {"eos_token": 3}, "tokenizer.json": ADDED}, None),
        ({"tokenizer_config.json": {"eos_token": "<|gone|>"}, "tokenizer.json": ADDED}, None),
    ],
)
def test_the_tokenizer_s_end_is_one_more(files: dict[str, Any], wanted: int | None, tmp_path: Path) -> None:
    found = eos_token_ids(write(tmp_path, ENDS | files), 100)
    assert found == ((0,) if wanted is None else (0, wanted))


def test_the_tokenizer_s_end_is_one_that_the_model_can_sample(tmp_path: Path) -> None:
    write(tmp_path, ENDS | {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "tokenizer.json": ADDED})
    assert eos_token_ids(tmp_path, 7) == (0,)


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["model.safetensors", "consolidated.safetensors", "x.safetensors"], ["model.safetensors"]),
        (["pytorch_model.safetensors"], ["pytorch_model.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["my-merge.safetensors", "adapter_model.safetensors", "optimizer.safetensors"], ["my-merge.safetensors"]),
        (["weights.safetensors", "consolidated.safetensors"], ["weights.safetensors"]),
        (
            ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["x-00001-of-00001.safetensors", "mtp.safetensors"], ["x-00001-of-00001.safetensors"]),
    ],
)
def test_weights_without_an_index(names: list[str], wanted: list[str], tmp_path: Path) -> None:
    touch(tmp_path, *names)
    assert has_weights(tmp_path)
    assert [path.name for path in weight_files(tmp_path)] == wanted


def test_an_index_is_right_about_its_shards(tmp_path: Path) -> None:
    write(tmp_path, {INDEX: {"weight_map": {"a": "b.safetensors", "c": "a.safetensors", "d": "a.safetensors"}}})
    touch(tmp_path, "model-00001-of-00001.safetensors")
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_shards_that_are_not_all_there(tmp_path: Path) -> None:
    touch(tmp_path, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    with pytest.raises(EngineError, match=r"one of 3 files of weights; there is no model-00002-of-00003\.safetensors"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.safetensors", "b.safetensors"], r"several files of weights, a\.safetensors, b\.safetensors, and none is"),
        (["a-00001-of-00001.safetensors", "b-00001-of-00001.safetensors"], "several files of weights"),
        ([f"{n}.safetensors" for n in range(9)], r"3\.safetensors, 4\.safetensors \.\.\., and none"),
        (["adapter_model.safetensors"], r"no model\.safetensors in"),
        (["pytorch_model.bin"], r"pytorch_model\.bin is a pickle, which is never loaded"),
    ],
)
def test_folders_without_one_model(names: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        weight_files(touch(tmp_path, *names))


def test_json_with_a_byte_order_mark(tmp_path: Path) -> None:
    for name, content in {
        "config.json": {"eos_token_id": 1},
        "generation_config.json": {"eos_token_id": 2},
        "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        "tokenizer.json": ADDED,
        INDEX: {"weight_map": {"a": "x.safetensors"}},
    }.items():
        (tmp_path / name).write_bytes(BOM_UTF8 + json.dumps(content).encode())
    assert read_json(tmp_path / "config.json") == {"eos_token_id": 1}
    assert eos_token_ids(tmp_path, 100) == (2, 1, 7)
    assert weight_files(tmp_path) == [tmp_path / "x.safetensors"]


@pytest.mark.parametrize("elsewhere", [None, "nothing", "other"])
def test_a_path_without_links_is_one_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: str | None
) -> None:
    """In the mounts of another process a path without links is none, or one to another file of this process."""
    touch(tmp_path, "blob", "other")
    link = tmp_path / "model.gguf"
    link.symlink_to("blob")
    if elsewhere is not None:
        monkeypatch.setattr(Path, "resolve", lambda path: tmp_path / elsewhere)
    assert real_path(link) == (tmp_path / "blob" if elsewhere is None else link)
