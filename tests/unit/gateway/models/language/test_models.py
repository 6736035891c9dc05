"""Where models come from, and what is read beside their weights."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from penstock.engines.contract.loading import Loading, silent
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.models.language import models
from penstock.gateway.models.language.hub import fetch_draft_model, fetch_model
from support.hub import commit, serving_hub


def test_a_local_folder_is_called_by_its_name(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").touch()
    source = models.find_model(str(tmp_path / "my-model"))
    assert source == models.ModelSource(tmp_path / "my-model", "my-model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "there is no folder or file /no/such/folder"),
        ("./nope", r"there is no folder or file \./nope"),
        ("~/no/such/folder", "there is no folder or file "),
        ("a/b/c", r"a/b/c is neither a folder or file here nor a model of the hub \(ORG/NAME\)"),
        ("no such name", r"no such name is neither a folder or file here nor a model of the hub \(ORG/NAME\)"),
        ("./missing.gguf", r"there is no file \./missing\.gguf"),
    ],
)
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(name, message):
    with pytest.raises(ConfigError, match=message):
        models.find_model(name)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"has no model: neither config\.json and tokenizer\.json nor a GGUF file"):
        models.find_model(str(tmp_path))
    (tmp_path / "add_sub").mkdir()
    (tmp_path / "add_sub" / "config.pbtxt").touch()
    with pytest.raises(ConfigError, match="--model-repository"):
        models.find_model(str(tmp_path))


def test_a_file_is_not_a_model(tmp_path):
    for name, message in (("model.bin", "is neither a GGUF file"), ("model.gguf", r"model\.gguf cannot be read")):
        file = tmp_path / name
        file.touch()
        with pytest.raises(ConfigError, match=message):
            models.find_model(str(file))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 0.7, "top_k": 20, "eos_token_id": 2}, {"temperature": 0.7, "top_k": 20}),
        ({"do_sample": False, "temperature": 1.0}, {"temperature": 0.0}),
        ({"temperature": None}, {}),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert models.default_params(tmp_path) == expected


def test_a_generation_config_with_a_byte_order_mark(tmp_path):
    (tmp_path / "generation_config.json").write_bytes(BOM_UTF8 + b'{"top_k": 20}')
    assert models.default_params(tmp_path) == {"top_k": 20}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model: .*generation_config\.json is not JSON"):
        models.default_params(tmp_path)


def test_a_model_without_generation_config_has_no_defaults(tmp_path):
    assert models.default_params(tmp_path) == {}


FILES = {"config.json": b'{"model_type": "llama"}', "weights.bin": b"", "model.safetensors": b"x" * 100_000}
FIRST = {
    "config.json": b'{"model_type": "qwen2"}',
    "model.safetensors": b"y" * 1000,
    "1_Pooling/config.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "adapter/config.json": b"{}",
    "onnx/config.json": b"{}",
    "original/config.json": b"{}",
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving_hub(FILES, v1=FIRST) as running:
        for name, value in running.environ(tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        yield running


async def test_a_hub_model_is_downloaded_without_what_is_not_needed(hub):
    reports = []
    source = await fetch_model("org/small", reports.append)
    assert source.name == "org/small"
    assert sorted(path.name for path in source.folder.iterdir()) == ["config.json", "model.safetensors"]
    assert reports[0] == Loading("download")
    assert all(report.stage == "download" and report.done <= report.total for report in reports)


async def test_a_draft_model_of_the_hub(hub, tmp_path):
    def settings(model: str | None) -> ModelSettings:
        return load_config({"speculative_model": model}, environ={}).models

    fetched = await fetch_draft_model(settings("org/small"), silent)
    assert (Path(fetched.model.speculative_model) / "model.safetensors").is_file()
    for local in (settings(None), settings(str(tmp_path))):
        assert await fetch_draft_model(local, silent) is local
    with pytest.raises(ConfigError, match="speculative-model: org/absent is neither a folder or file here nor"):
        await fetch_draft_model(settings("org/absent"), silent)


async def test_a_revision_of_a_hub_model(hub):
    for wanted in ("v1", commit("v1")):
        source = await fetch_model("org/small", lambda report: None, wanted)
        assert source.folder.name == commit("v1")
        assert (source.folder / "config.json").read_bytes() == FIRST["config.json"]
    assert (source.folder / "1_Pooling" / "config.json").is_file(), "sentence-transformers' modules are read"
    folders = {path.name for path in source.folder.iterdir() if path.is_dir()}
    assert folders == {"1_Pooling", "additional_chat_templates"}
    with pytest.raises(ConfigError, match="org/small has no such revision"):
        await fetch_model("org/small", lambda report: None, "v2")


async def test_a_folder_has_no_revision(tmp_path):
    for model in (None, str(tmp_path)):
        with pytest.raises(ConfigError, match="revision: only hub models have revisions"):
            await fetch_model(model, lambda report: None, "v1")


async def test_an_unknown_hub_model_is_a_clear_error(hub):
    with pytest.raises(ConfigError, match="org/absent is neither a folder or file here nor a model of the hub"):
        await fetch_model("org/absent", lambda report: None)


async def test_local_models_are_fetched_from_where_they_are(tmp_path):
    assert (await fetch_model(None, lambda report: None)).name == models.DEMO_NAME
    (tmp_path / "config.json").touch()
    assert (await fetch_model(str(tmp_path), lambda report: None)).folder == tmp_path
    with pytest.raises(ConfigError, match="there is no folder or file"):
        await fetch_model("./nope", lambda report: None)


@pytest.mark.parametrize(("name", "is_one"), [("org/model", True), ("gpt2", True), ("./x", False), ("a/b/c", False)])
def test_what_may_be_on_the_hub(name, is_one):
    assert models.is_hub_id(name) is is_one
    assert not models.is_hub_id(models.DEMO_NAME)
    assert not models.is_hub_id(None)
