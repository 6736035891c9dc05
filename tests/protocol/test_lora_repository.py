"""Models of a repository have adapters of their own; they come and go with their model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.adapters import save_adapter
from support.server import Server, serving

CONTROL = ("--model-control-mode", "explicit")


def save_model(folder: Path, **settings: Any) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text('backend: "penstock"\n')
    chosen = {"model": "penstock-demo", "engine": "simulated"} | settings
    (folder / "1" / "model.json").write_text(json.dumps(chosen))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two models: `red` with an adapter beside it, and `blue` that may get some."""
    save_model(tmp_path / "models" / "red", lora=["tuned=adapters/one"])
    save_adapter(tmp_path / "models" / "red" / "1" / "adapters" / "one")
    save_model(tmp_path / "models" / "blue", lora_directory=str(tmp_path / "shop"))
    save_adapter(tmp_path / "shop" / "two")
    return tmp_path / "models"


def parents(server: Server) -> dict[str, Any]:
    return {model.id: model.to_dict()["parent"] for model in server.client().models.list()}


def test_adapters_come_and_go_with_their_model(repository: Path) -> None:
    with serving("--model-repository", str(repository), *CONTROL, "--load-model=*") as server:
        assert parents(server) == {"red": None, "blue": None, "tuned": "red"}
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": "two"})
        assert refused.status_code == 409
        body = {"lora_name": "more", "lora_path": "two"}
        stays = server.post("/v1/load_lora_adapter", body | {"base_model_name": "red"})
        assert (stays.status_code, stays.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert server.post("/v1/load_lora_adapter", body | {"base_model_name": "blue"}).status_code == 200
        assert server.client().completions.create(model="more", prompt="x").usage
        assert parents(server)["more"] == "blue"
        save_model(repository / "blue", lora=["tuned=" + str(repository.parent / "shop" / "two")])
        clash = server.post("/v2/repository/models/blue/load", {})
        assert clash.status_code == 400
        assert "The name `tuned` is taken" in clash.text
        assert parents(server) == {"red": None, "blue": None, "tuned": "red", "more": "blue"}
        assert server.post("/v2/repository/models/red/unload", {}).status_code == 200
        assert server.post("/v2/repository/models/blue/load", {}).status_code == 200
        assert parents(server) == {"blue": None, "tuned": "blue"}


def test_adapters_on_the_command_line_need_a_model_there(repository: Path) -> None:
    server = Server("--model-repository", str(repository), "--lora-directory", ".")
    assert server.process.wait(60) == 1
    server.wait_for_log("lora: there is no MODEL; a model in a repository has its adapters in its model.json")


def test_adapters_on_the_command_line_are_not_those_of_the_repository(repository: Path) -> None:
    given = f"mine={repository.parent / 'shop' / 'two'}"
    with serving(
        "penstock-demo", "--engine", "simulated", "--lora", given, "--model-repository", str(repository)
    ) as server:
        server.wait_for_log(r"ready: 3 models")
        assert parents(server) == {
            "penstock-demo": None,
            "red": None,
            "blue": None,
            "mine": "penstock-demo",
            "tuned": "red",
        }
