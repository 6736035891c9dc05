"""Names of adapters, and where a client's path may lead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.engines.errors import InvalidRequestError, NotFoundError, UnsupportedError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.language.adapters import (
    AdapterSet,
    CallCounter,
    check_name,
    find_folder,
    new_adapter,
    parse_adapters,
    parse_directory,
)
from support.adapters import save_adapter


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """shop/good, shop/nested/deep, and beside it outside/secret."""
    save_adapter(tmp_path / "shop" / "good")
    save_adapter(tmp_path / "shop" / "nested" / "deep")
    save_adapter(tmp_path / "outside" / "secret")
    return tmp_path / "shop"


def test_the_setting_names_folders(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shop)
    given = ["org/one=good", f" two = {shop}/nested/deep ", "a=./good"]
    assert parse_adapters(given, ["m"]) == {"org/one": shop / "good", "two": shop / "nested/deep", "a": shop / "good"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["good"], "not NAME=FOLDER"),
        (["=good"], "not NAME=FOLDER"),
        (["x="], "not NAME=FOLDER"),
        (["x=good", "x=good"], "'x' is given twice"),
        (["m=good"], r"'m' is given twice \(it is a model's\)"),
        (["a\nb=good"], "not a name"),
        (["n" * 257 + "=good"], "not a name"),
        (["x=nowhere"], "nowhere is not a folder with a LoRA adapter"),
        (["x=nested"], "it has no adapter_config.json"),
    ],
)
def test_settings_that_cannot_be(shop: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], told: str) -> None:
    monkeypatch.chdir(shop)
    with pytest.raises(ConfigError, match=f"lora: .*{told}"):
        parse_adapters(given, ["m"])


def test_the_directory_must_be_one(shop: Path) -> None:
    assert parse_directory(None) is None
    assert parse_directory(str(shop / "nested" / "..")) == shop
    with pytest.raises(ConfigError, match=r"lora-directory: .*nope is not a folder"):
        parse_directory(str(shop / "nope"))


@pytest.mark.parametrize("name", ["", " ", "a ", "\ta", "a\0b", "a\x7f", "a\u2028b", "x" * 257])
def test_names_that_clients_may_not_give(name: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_name(name)
    assert refused.value.param == "lora_name"


@pytest.mark.parametrize("name", ["a", "org/a-1.0", "höflich", "two words", "x" * 256])
def test_names_that_clients_may_give(name: str) -> None:
    check_name(name)


def test_paths_are_relative_to_the_directory_or_lie_in_it(shop: Path) -> None:
    assert find_folder(shop, "good") == shop / "good"
    assert find_folder(shop, "nested/../nested/deep/") == shop / "nested" / "deep"
    assert find_folder(shop, str(shop / "good")) == shop / "good"
    (shop / "newest").symlink_to("good")
    assert find_folder(shop, "newest") == shop / "good"


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../outside/secret", "../outside/nothing", "/etc", "good/../..", "a\0b", "link", "link/../secret"],
)
def test_no_path_leads_out(shop: Path, path: str) -> None:
    (shop / "link").symlink_to(shop.parent / "outside" / "secret")
    with pytest.raises(InvalidRequestError, match="must lie below the server's lora-directory") as refused:
        find_folder(shop, path)
    assert type(refused.value) is InvalidRequestError
    assert str(shop.parent) not in refused.value.message


def test_a_folder_beside_the_directory_with_its_name_s_beginning_is_outside(shop: Path) -> None:
    save_adapter(shop.parent / "shop-2" / "x")
    with pytest.raises(InvalidRequestError, match="must lie below"):
        find_folder(shop, "../shop-2/x")


def test_the_same_is_said_of_what_is_outside_and_what_is_nowhere(shop: Path) -> None:
    """Whether a file exists outside cannot be found out."""
    messages = []
    for path in ("../outside/secret", "../outside/nothing", "/nonexistent/folder"):
        with pytest.raises(InvalidRequestError) as refused:
            find_folder(shop, path)
        messages.append((type(refused.value), refused.value.message))
    assert len(set(messages)) == 1


def test_a_file_of_the_adapter_may_not_be_a_link_to_the_outside(shop: Path) -> None:
    (shop / "good" / "weights.safetensors").symlink_to(shop / "nested" / "deep" / "adapter_model.safetensors")
    assert find_folder(shop, "good")
    (shop / "good" / "more.safetensors").symlink_to(shop.parent / "outside" / "secret" / "adapter_model.safetensors")
    with pytest.raises(InvalidRequestError, match="must lie below"):
        find_folder(shop, "good")


@pytest.mark.parametrize("path", ["nested", "nothing", "good/adapter_config.json", "x" * 300, "good/" * 2000])
def test_folders_without_an_adapter_are_not_found(shop: Path, path: str) -> None:
    with pytest.raises(NotFoundError) as refused:
        find_folder(shop, path)
    assert refused.value.param == "lora_path"
    assert str(shop) not in refused.value.message


def test_no_key_comes_twice(shop: Path) -> None:
    names = ["a", "a", "a:1", "a:1:1", "b"]
    keys = [new_adapter(name, shop / "good").key for name in names]
    assert len(set(keys)) == len(keys)
    assert new_adapter("org/a", shop / "good").root == "good"


def test_an_unknown_adapter_is_answered_with_those_that_are_there(shop: Path) -> None:
    adapters = AdapterSet([new_adapter(name, shop / "good") for name in ("a", "b")])
    assert adapters.named("b").name == "b"
    with pytest.raises(InvalidRequestError, match=r"LoRA c is not supported, we currently support \['a', 'b'\]"):
        adapters.named("c")
    with pytest.raises(UnsupportedError, match="LoRA feature is not enabled"):
        AdapterSet().named("a")


async def test_idle_is_when_the_last_call_has_ended() -> None:
    users = CallCounter()
    await users.wait_idle()
    users.begin()
    users.begin()
    waiting = asyncio.create_task(users.wait_idle())
    users.end()
    await asyncio.sleep(0)
    assert (users.calls, waiting.done()) == (1, False)
    users.end()
    await waiting
    await users.wait_idle()
