"""LoRA adapters through a real server: the openai SDK, and vLLM's routes for loading and unloading."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.adapters import save_adapter
from support.server import Server, refusal, serving

ASK = [{"role": "user", "content": "Which weights are yours?"}]
SIMULATED = ("--engine", "simulated", "--served-model-name", "base", "--served-model-name", "alias")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("one", "two", "three", "four"):
        save_adapter(folder / "shop" / name)
    save_adapter(folder / "outside")
    return folder / "shop"


@pytest.fixture(scope="module")
def server(shop: Path) -> Iterator[Server]:
    """`org/first` comes with the model, there is room for three, and a step takes long enough to be caught at work."""
    flags = ("--lora", f"org/first={shop / 'one'}", "--lora-directory", str(shop), "--max-loras", "3")
    with serving(*SIMULATED, *flags, "--sim-step-ms", "5", "--stream-interval-ms", "0") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """At the end every adapter but the first is unloaded."""
    yield server.client()
    for model in server.client().models.list():
        if model.id not in ("base", "alias", "org/first"):
            assert unload(server, model.id).status_code == 200


def load(server: Server, name: str, path: str, **fields: Any) -> httpx.Response:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})


def unload(server: Server, name: str) -> httpx.Response:
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def answer(client: openai.OpenAI, model: str) -> str:
    done = client.chat.completions.create(model=model, messages=ASK, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert done.model == model
    return done.choices[0].message.content or ""


def test_adapters_are_listed_with_their_parent(server: Server, client: openai.OpenAI) -> None:
    listed = {model.id: model.to_dict() for model in client.models.list()}
    assert list(listed) == ["base", "alias", "org/first"]
    assert (listed["base"]["parent"], listed["org/first"]["parent"]) == (None, "base")
    assert listed["org/first"]["root"] == "one"
    assert client.models.retrieve("org/first").to_dict() == listed["org/first"]
    assert list(httpx.get(server.url + "/version").json()["runners"]) == ["base", "alias"]


def test_an_adapter_is_used_like_a_model(client: openai.OpenAI) -> None:
    assert answer(client, "org/first") == answer(client, "org/first") != answer(client, "base")
    text = client.completions.create(model="org/first", prompt="a b c", max_tokens=4, stream=True)
    assert {chunk.model for chunk in text} == {"org/first"}


def test_an_adapter_comes_and_goes(server: Server, client: openai.OpenAI) -> None:
    loaded = load(server, "new", "two")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    assert answer(client, "new") not in (answer(client, "base"), answer(client, "org/first"))
    gone = unload(server, "new")
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    with pytest.raises(openai.NotFoundError) as missing:
        answer(client, "new")
    assert missing.value.code == "model_not_found"


def test_an_adapter_can_be_replaced_in_place(server: Server, client: openai.OpenAI) -> None:
    load(server, "new", "two")
    before = answer(client, "new")
    taken = load(server, "new", "three")
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "already_exists")
    assert load(server, "new", "three", load_inplace=True).status_code == 200
    assert client.models.retrieve("new").to_dict()["root"] == "three"
    assert answer(client, "new") != before


def test_what_runs_ends_on_its_adapter(server: Server, client: openai.OpenAI) -> None:
    load(server, "new", "two")
    greedy: dict[str, Any] = {"model": "new", "prompt": "a b c", "max_tokens": 60, "temperature": 0}
    whole = client.completions.create(**greedy).choices[0].text
    parts = []
    with server.stream("/v1/completions", greedy) as events:
        parts.append(next(events)["choices"][0]["text"])
        assert unload(server, "new").status_code == 200
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="new", prompt="a")
        assert 'adapter="new"' not in httpx.get(server.operator + "/metrics").text
        parts += [event["choices"][0]["text"] for event in events if event != "[DONE]"]
    assert "".join(parts) == whole


def test_the_engine_has_room_for_so_many(server: Server, client: openai.OpenAI) -> None:
    assert [load(server, name, name).status_code for name in ("two", "three")] == [200, 200]
    full = load(server, "four", "four")
    assert full.status_code == 503
    assert full.json()["error"]["code"] == "overloaded"
    unload(server, "two")
    assert load(server, "four", "four").status_code == 200


@pytest.mark.parametrize("path", ["../outside", "/etc", "one/../../outside", "", "a\0b"])
def test_paths_do_not_lead_out(server: Server, shop: Path, path: str) -> None:
    refused = load(server, "new", path)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert str(shop.parent) not in refused.text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("load", {"lora_name": "new", "lora_path": "nothing"}, 404, "lora_path"),
        ("load", {"lora_name": "new"}, 400, "lora_path"),
        ("load", {"lora_path": "one"}, 400, "lora_name"),
        ("load", {"lora_name": "", "lora_path": "one"}, 400, "lora_name"),
        ("load", {"lora_name": "a\nb", "lora_path": "one"}, 400, "lora_name"),
        ("load", {"lora_name": 5, "lora_path": "one"}, 400, "lora_name"),
        ("load", {"lora_name": "new", "lora_path": "one", "load_inplace": "yes"}, 400, "load_inplace"),
        ("load", {"lora_name": "new", "lora_path": "one", "is_3d_lora_weight": True}, 400, "is_3d_lora_weight"),
        ("load", {"lora_name": "new", "lora_path": "one", "base_model_name": "x"}, 404, "base_model_name"),
        ("load", {"lora_name": "base", "lora_path": "one", "load_inplace": True}, 409, "lora_name"),
        ("unload", {"lora_name": "nobody"}, 404, "lora_name"),
        ("unload", {"lora_name": "base"}, 404, "lora_name"),
        ("unload", {}, 400, "lora_name"),
    ],
)
def test_what_cannot_be(
    server: Server, client: openai.OpenAI, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    refused = server.post(f"/v1/{path}_lora_adapter", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert [model.id for model in client.models.list()] == ["base", "alias", "org/first"]


def test_kserve_requests_choose_an_adapter_by_name(server: Server, client: openai.OpenAI) -> None:
    def generate(**sampling: Any) -> httpx.Response:
        body = {
            "text_input": "a b c",
            "sampling_parameters": json.dumps({"max_tokens": 8, "temperature": 0} | sampling),
        }
        return server.post("/v2/models/base/generate", body)

    greedy: dict[str, Any] = {"prompt": "a b c", "max_tokens": 8, "temperature": 0}
    texts = {name: client.completions.create(model=name, **greedy).choices[0].text for name in ("base", "org/first")}
    assert generate().json()["text_output"] == "a b c" + texts["base"]
    assert generate(lora_name="org/first").json()["text_output"] == "a b c" + texts["org/first"]
    unknown = generate(lora_name="other")
    assert unknown.status_code == 400
    assert unknown.json()["error"] == "LoRA other is not supported, we currently support ['org/first']"
    load(server, "plain", "two")
    assert "unknown model: 'plain'" in httpx.get(server.url + "/v2/models/plain").text


def test_adapters_survive_their_engine(server: Server, client: openai.OpenAI) -> None:
    load(server, "new", "two")
    before = [answer(client, name) for name in ("org/first", "new")]
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.wait_for_log(r"the engine is back")
    server.wait_ready()
    assert [answer(client, name) for name in ("org/first", "new")] == before
    assert 'penstock_lora_adapters{model="base"} 2.0' in httpx.get(server.operator + "/metrics").text


def test_nothing_is_loaded_at_run_time_unless_the_server_allows_it(shop: Path) -> None:
    with serving(*SIMULATED, "--lora", f"fixed={shop / 'one'}") as server:
        for refused in (load(server, "new", "one"), unload(server, "fixed")):
            assert refused.status_code == 403
            assert "--lora-directory" in refused.json()["error"]["message"]
        assert answer(server.client(), "fixed")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--lora", "nothing"), "lora: 'nothing' is not NAME=FOLDER"),
        (("--lora", "base=shop/one"), r"lora: the name 'base' is given twice \(it is a model's\)"),
        (("--lora-directory", "nowhere"), "lora-directory: nowhere is not a folder"),
    ],
)
def test_settings_that_cannot_be_end_the_start(
    flags: tuple[str, ...], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert re.search(told, refusal(caplog, *SIMULATED, *flags))
