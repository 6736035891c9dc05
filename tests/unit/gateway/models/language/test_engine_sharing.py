"""What a server says of an engine that others use, or that runs elsewhere; the key that both sides share."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.keys import client_pair, engine_pair, new_key, read_key
from penstock.engines.host.content_digest import ModelDigests, model_digests
from penstock.engines.registry import EngineSpec, engine_fingerprint
from penstock.gateway.cli import main
from penstock.gateway.configuration.config import Config, ConfigError, load_config
from penstock.gateway.configuration.sections.server import ServerConfig
from penstock.gateway.models.language.adapters import AdapterSet
from penstock.gateway.models.language.engine_sharing import door_spec, engine_elsewhere
from penstock.gateway.models.language.kserve.penstock_layout import PenstockLayout
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import ModelSource, find_model
from support.door import INFO
from support.language_repository import context

DEMO = find_model(None)


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "engine.key"
    assert main(["key", "new", "--engine", "--file", str(path)]) == 0
    return str(path)


def config(**settings: Any) -> Config:
    return load_config(settings, environ={})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_door": "tcp://127.0.0.1:7000"}, "over tcp an engine needs an engine-key"),
        ({"engine_door": "tcp://0.0.0.0:7000"}, "over tcp an engine needs an engine-key"),
        ({"engine_door": "127.0.0.1:7000"}, "neither ipc:///PATH nor tcp://HOST:PORT"),
        ({"engine_door": "ipc://@abstract"}, "neither ipc:///PATH nor tcp://HOST:PORT"),
        ({"engine_door": "tcp://host"}, "neither ipc:///PATH nor tcp://HOST:PORT"),
        ({"engine_door": "ipc:///nowhere/at/all/door"}, "No such file"),
        ({"engine_door_clients": 3}, "there is no engine-door"),
        ({"engine_key": "key"}, "neither an engine-door nor an engine-address"),
        ({"engine_door": "ipc:///tmp/p/door", "engine_key": "key"}, "is on this machine"),
        ({"engine_door": "ipc:///tmp/p/door", "sleep_idle_seconds": 9.0}, "may be in use"),
    ],
)
def test_doors_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        door_spec(config(**settings).models, DEMO)


def test_a_socket_lies_where_nobody_else_can_go(tmp_path: Path) -> None:
    made = door_spec(config(engine_door=f"ipc://{tmp_path}/new/door").models, DEMO)
    assert made is not None
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        door_spec(config(engine_door=f"ipc://{tmp_path}/open/door").models, DEMO)


def test_a_key_file_is_this_user_s_alone(key: str) -> None:
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    spec = door_spec(config(engine_door="tcp://*:7000", engine_key=key).models, DEMO)
    assert spec is not None
    assert spec.key == read_key(Path(key))
    os.chmod(key, 0o640)
    with pytest.raises(ConfigError, match=r"engine-key: .*chmod 600"):
        door_spec(config(engine_door="tcp://*:7000", engine_key=key).models, DEMO)


def test_a_file_with_something_else_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for text in ("", "pek-", "psk-" + new_key()[4:], new_key()[:-3], new_key() + "AAAA"):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ValueError, match="no key for an engine's door"):
            read_key(path)


def test_keys_are_made_once_and_have_no_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert main(["key", "new", "--engine", "--file", str(path)]) == 0
    before = path.read_text()
    for flags in (["--file", str(path)], ["--requests-per-minute", "3"]):
        with pytest.raises(SystemExit):
            main(["key", "new", "--engine", *flags])
    assert path.read_text() == before
    capsys.readouterr()
    assert main(["key", "new", "--engine"]) == 0
    assert capsys.readouterr().out.startswith("pek-")


def test_each_side_has_a_key_pair_of_its_own() -> None:
    first, second = new_key(), new_key()
    pairs = [engine_pair(first), client_pair(first), engine_pair(second), client_pair(second)]
    assert len({pair.public for pair in pairs} | {pair.secret for pair in pairs}) == 8
    assert engine_pair(first) == pairs[0]


@pytest.mark.parametrize(
    "setting",
    [
        {"engine": "simulated"},
        {"max_num_seqs": 3},
        {"num_kv_blocks": 9},
        {"max_model_len": 64},
        {"lora_directory": "/adapters"},
        {"sim_step_ms": 1.0},
        {"stream_interval_ms": 0.0},
        {"sleep_idle_seconds": 9.0},
        {"tensor_parallel_size": 2},
        {"engine_door": "ipc:///tmp/p/door"},
    ],
)
def test_settings_of_an_engine_are_set_where_it_is_started(setting: dict[str, Any]) -> None:
    [name] = setting
    settings = config(engine_address="ipc:///tmp/p/other", **setting)
    with pytest.raises(ConfigError, match=f"{name.replace('_', '-')}: with engine-address"):
        engine_elsewhere(settings.models, settings.server, DEMO)


def test_a_gateway_without_an_engine_needs_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO.folder, folder, ignore=lambda _, names: [n for n in names if n.endswith(".safetensors")])
    settings = config(engine_address="ipc:///tmp/p/door", policy="fair", served_model_name=("a", "b")).models
    model = ModelBuilder().build(settings, ModelSource(folder, "model"))
    assert model.names == ("a", "b")
    assert not model.engine.ready
    found = engine_elsewhere(settings, ServerConfig(), ModelSource(folder, "model"))
    assert found is not None
    assert found[1].differs(model_digests(DEMO.folder)) == ""


def test_a_model_of_a_repository_may_name_an_engine_elsewhere(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "penstock"')
    (version / "model.json").write_text('{"model": "penstock-demo", "engine_address": "ipc:///tmp/p/door"}')
    server = config(engine_door="ipc:///tmp/p/own", max_num_seqs=9, engine="simulated", policy="fair", threads=1).models
    own = PenstockLayout().configure(server, context(version))
    assert own.scheduling.policy == "fair"
    assert engine_elsewhere(own, ServerConfig(), DEMO) is not None
    (version / "model.json").write_text('{"model": "penstock-demo"}')
    assert PenstockLayout().configure(server, context(version)).door.engine_door is None
    (version / "model.json").write_text('{"model": "penstock-demo", "engine_door": "ipc:///tmp/p/third"}')
    with pytest.raises(ConfigError, match="engine_door"):
        PenstockLayout().configure(server, context(version))


def test_adapters_follow_the_engine_s() -> None:
    adapters = AdapterSet()
    adapters.follow(["org/first:1", "second:2"], 4)
    first = adapters.named("org/first")
    assert (first.key, first.root, adapters.max_loaded) == ("org/first:1", "first", 4)
    adapters.follow(["second:3", "org/first:1"], 4)
    assert adapters.named("org/first") is first, "its calls are counted on"
    assert adapters.named("second").key == "second:3"
    adapters.follow([], 4)
    assert len(adapters) == 0


def test_digests_tell_copies_from_other_models(tmp_path: Path) -> None:
    here, copy = tmp_path / "here", tmp_path / "copy"
    here.mkdir()
    (here / "config.json").write_text("{}")
    (here / "tokenizer.json").write_text("[]")
    (here / "model.safetensors").write_bytes(bytes(1_000_000))
    shutil.copytree(here, copy)
    (copy / "README.md").write_text("other")
    assert model_digests(copy) == model_digests(here)
    (copy / "model.safetensors").write_bytes(bytes(300_000) + b"x" + bytes(699_999))
    assert model_digests(here).differs(model_digests(copy)) == "weights"
    (copy / "tokenizer.json").write_text("[1]")
    assert model_digests(here).differs(model_digests(copy)) == "configuration or tokenizer"
    (copy / "model.safetensors").unlink()
    (copy / "tokenizer.json").write_text("[]")
    assert model_digests(here).differs(model_digests(copy)) == ""


def test_fingerprints_are_of_what_decides_tokens() -> None:
    def fingerprint(weights: str = "w", info: ModelInfo = INFO, **options: Any) -> str:
        return engine_fingerprint(EngineSpec(runner="openvino", options=options), info, ModelDigests("v", weights))

    plain = fingerprint(dtype="f32", model_dir="/a", threads=2)
    assert plain == fingerprint(dtype="f32", model_dir="/b", threads=8)
    assert plain != fingerprint(dtype="bf16", model_dir="/a", threads=2)
    assert plain != fingerprint("x", dtype="f32", model_dir="/a", threads=2)
    in_bf16, in_f32 = (msgspec.structs.replace(INFO, numerics=types) for types in ("bf16, kv bf16", "f32, kv f32"))
    assert fingerprint(info=in_bf16, dtype="auto") != fingerprint(info=in_f32, dtype="auto"), "two machines' auto"
