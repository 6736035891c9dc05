"""What is read from sentence-transformers' files, and what is refused."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.encoder.model_folder import SentenceRecipe, makes_vectors, read_recipe
from penstock.engines.errors import EngineError, UnsupportedError

POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MEAN = {"pooling_mode_mean_tokens": True}


def write(folder: Path, **files: Any) -> Path:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / ("1_Pooling/config.json" if name == "pooling" else f"{name}.json")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_folder_without_them(tmp_path: Path) -> None:
    assert read_recipe(tmp_path) == SentenceRecipe(pooling=("mean",), normalize=False)


def test_all_of_them(tmp_path: Path) -> None:
    said = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    folder = write(
        tmp_path,
        modules=[POOLING, NORMALIZE],
        pooling=MEAN,
        sentence_bert_config={"max_seq_length": 12, "do_lower_case": True},
        config_sentence_transformers=said,
    )
    recipe = read_recipe(folder)
    assert (recipe.pooling, recipe.normalize, recipe.max_tokens, recipe.lower_case) == (("mean",), True, 12, True)
    assert (recipe.prompts["query"], recipe.default_prompt) == ("query: ", "query: ")


def test_files_with_byte_order_marks(tmp_path: Path) -> None:
    write(tmp_path, modules=[POOLING, NORMALIZE], pooling=MEAN, sentence_bert_config={"max_seq_length": 12})
    for path in tmp_path.rglob("*.json"):
        path.write_bytes(BOM_UTF8 + path.read_bytes())
    recipe = read_recipe(tmp_path)
    assert (recipe.pooling, recipe.normalize, recipe.max_tokens) == (("mean",), True, 12)


@pytest.mark.parametrize("given", ["cls", ["cls", "mean"]])
def test_the_newer_name_of_the_pooling(given: Any, tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, modules=[POOLING], pooling={"pooling_mode": given}))
    assert recipe.pooling == (("cls",) if given == "cls" else ("cls", "mean"))


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"modules": [{"path": "", "type": "x.CLIPModel"}]}, UnsupportedError, "CLIPModel; supported are"),
        ({"modules": [NORMALIZE, POOLING], "pooling": MEAN}, UnsupportedError, "Pooling after Normalize"),
        ({"modules": [POOLING | {"path": "../x"}]}, UnsupportedError, "not in the model's folder"),
        ({"modules": [POOLING], "pooling": {}}, UnsupportedError, "the pooling"),
        ({"modules": [POOLING], "pooling": {"pooling_mode": "attention"}}, UnsupportedError, "the pooling"),
        ({"modules": [POOLING], "pooling": "nonsense"}, EngineError, "not JSON"),
        ({"modules": "nonsense"}, EngineError, "not JSON"),
        ({"modules": [{}]}, EngineError, "damaged"),
        ({"modules": {"a": 1}}, EngineError, "damaged"),
        ({"config_sentence_transformers": {"prompts": 3}}, EngineError, "damaged"),
        (
            {
                "modules": [POOLING],
                "pooling": MEAN | {"include_prompt": False},
                "config_sentence_transformers": {"prompts": {"query": "query: "}},
            },
            UnsupportedError,
            "leaves the prompt out",
        ),
    ],
)
def test_what_is_damaged_or_not_supported_is_refused(
    files: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        read_recipe(write(tmp_path, **files))


def test_which_folders_hold_such_models(tmp_path: Path) -> None:
    assert not makes_vectors(tmp_path)
    assert not makes_vectors(write(tmp_path, config={"architectures": ["LlamaForCausalLM"]}))
    assert makes_vectors(write(tmp_path, config={"architectures": ["BertForSequenceClassification"]}))
    assert makes_vectors(write(tmp_path, config={"architectures": ["Qwen3ForCausalLM"]}, modules=[]))
