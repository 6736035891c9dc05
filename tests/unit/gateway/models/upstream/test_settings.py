"""Settings of models that other servers have, and where they may stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError
from penstock.engines.kv_events.settings import KVEventsSource
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.configuration.upstream_settings import BaseUrl, base_url
from penstock.gateway.models.upstream.kserve_model import upstream_settings
from penstock.gateway.models.upstream.request_writing import ApiKey, UpstreamRequest


def loaded(*given: Any) -> Any:
    return load_config({"upstream": list(given)}, environ={}).upstream.upstream


def test_a_flag_is_a_name_with_a_url_or_an_object() -> None:
    short, long = loaded("a=http://h:1", '{"name": "b", "url": ["https://x/api/v1/", "http://[::1]:2"], "retries": 0}')
    assert (short.name, short.urls, short.retries) == ("a", ("http://h:1",), 2)
    assert (long.name, long.retries) == ("b", 0)
    assert [base_url(url) for url in long.urls] == [BaseUrl(True, "x", 443, "/api/v1"), BaseUrl(False, "::1", 2, "/v1")]
    assert [base_url(url).authority for url in long.urls] == ["x", "[::1]:2"]


def test_a_variable_has_several() -> None:
    config = load_config({}, environ={"PENSTOCK_UPSTREAM": "a=http://h;b=http://i"})
    assert [each.name for each in config.upstream.upstream] == ["a", "b"]


TWO = {"name": "a", "url": ["http://h", "http://i"]}


def test_events_are_named_for_each_url() -> None:
    [settings] = loaded(
        TWO | {"kv_events": ["", {"endpoint": "tcp://[::1]:1", "topic": "kv"}], "tokenizer": "a folder"}
    )
    assert settings.events_of_urls == (None, KVEventsSource(endpoint="tcp://[::1]:1", topic="kv"))
    several = KVEventsSource(endpoint="tcp://h:1", replay_endpoint="tcp://h:9", topic="kv", ranks=2)
    [first, second] = several.of_ranks()
    assert (first.endpoint, first.replay_endpoint) == ("tcp://h:1", "tcp://h:9")
    assert second == KVEventsSource(endpoint="tcp://h:2", replay_endpoint="tcp://h:10", topic="kv")
    [settings] = loaded(TWO | {"kv_events": ["", ""]})
    assert settings.events_of_urls == ()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("http://h", "NAME=URL"),
        ("=http://h", "NAME=URL"),
        ("{", "JSON object"),
        ("a=ftp://h", "must be like"),
        ("a=http://", "must be like"),
        ("a=http://user:hunter2@h", "must not hold"),
        ("a=http://h:99999", "invalid port or address"),
        ("a=http://h?x=1", "end with its path"),
        ({"name": "a", "url": []}, "1 to 64 urls"),
        ({"name": "a", "url": ["http://h", "http://h/v1"]}, "twice"),
        ({"name": "a", "url": "http://h", "hedge_after": 1}, "hedge_after"),
        ({"name": "a", "url": ["http://h", "http://i"], "hedge_after": 1, "retry_ratio": 0}, "hedge_after"),
        ({"name": "a", "url": "http://h", "apis": []}, "empty"),
        ({"name": "a", "url": "http://h", "fallbacks": ["a"]}, "other models"),
        ({"name": "a", "url": "http://h", "headers": {"x y": "z"}}, "no header"),
        ({"name": "a", "url": "http://h", "headers": {"x": "a\r\nb: c"}}, "no header"),
        ({"name": "a", "url": "http://h", "headers": {"Authorization": "Bearer x"}}, "written by this server"),
        ({"name": "a", "url": "http://h", "api_key_env": "X", "client_key": True}, "only one"),
        ({"name": "a", "url": "http://h", "colour": "red"}, "colour"),
        (TWO | {"kv_events": ["tcp://h:1"], "tokenizer": "t"}, "one entry for each url"),
        (TWO | {"kv_events": "tcp://h:1", "tokenizer": "t"}, "one entry for each url"),
        (TWO | {"kv_events": ["tcp://h:1", ""]}, "needs a tokenizer"),
        (TWO | {"kv_events": ["tcp://h", ""], "tokenizer": "t"}, "tcp://HOST:PORT"),
        (TWO | {"kv_events": [{"endpoint": "ipc://x"}, ""], "tokenizer": "t"}, "tcp://HOST:PORT"),
        (TWO | {"kv_events": [{"endpoint": "tcp://h:1", "replay_endpoint": "h:2"}, ""]}, "replay_endpoint"),
        (TWO | {"kv_events": ["tcp://*:1", ""], "tokenizer": "t"}, "tcp://HOST:PORT"),
        (TWO | {"kv_events": [{"endpoint": "tcp://h:65535", "ranks": 2}, ""], "tokenizer": "t"}, "tcp://HOST:PORT"),
        (TWO | {"kv_events": [{"endpoint": "tcp://h:1", "ranks": 0}, ""], "tokenizer": "t"}, "from 1 to 64"),
        (TWO | {"kv_events": ["tcp://h:1", ""], "tokenizer": "t", "routing": "round-robin"}, "routing by prefix"),
        ({"name": "a", "url": "http://h", "kv_events": "tcp://h:1", "tokenizer": "t"}, "several urls"),
        (TWO | {"tokenizer": "t"}, "only kv_events needs it"),
    ],
)
def test_what_cannot_be_is_an_error(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        loaded(given)
    assert "hunter2" not in str(caught.value)


def test_a_name_is_there_once() -> None:
    with pytest.raises(ConfigError, match="same name"):
        loaded("a=http://h", "a=http://i")


def test_a_folder_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"url": "http://h", "api_key_file": "key", "ca_file": "/elsewhere"}')
    (tmp_path / "key").write_text("k")
    config = ModelConfig(name="mine")
    config.parameters["max_in_flight"].string_value = "7"
    settings = upstream_settings(config, tmp_path)
    assert (settings.name, settings.max_in_flight) == ("mine", 7)
    assert settings.api_key_file == str(tmp_path / "key")
    assert settings.ca_file == "/elsewhere"
    config.parameters["name"].string_value = "other"
    with pytest.raises(ConfigError, match="folder"):
        upstream_settings(config, tmp_path)


def test_keys_of_other_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", " sk-1\n")
    assert ApiKey(None, "THE_KEY").value == "sk-1"
    assert ApiKey(None, None).value == ""
    monkeypatch.setenv("THE_KEY", "")
    with pytest.raises(ConfigError, match="THE_KEY"):
        ApiKey(None, "THE_KEY")
    (tmp_path / "key").write_text("two words")
    for file in ("key", "missing"):
        with pytest.raises(ConfigError, match=file) as caught:
            ApiKey(str(tmp_path / file), None)
        assert "words" not in str(caught.value)


def test_a_key_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("penstock.gateway.models.upstream.request_writing.time.monotonic", lambda: now)
    (tmp_path / "key").write_text("old")
    key = ApiKey(str(tmp_path / "key"), None)
    (tmp_path / "key").write_text("newer")
    assert key.value == "old"
    now = 6.0
    assert key.value == "newer"
    (tmp_path / "key").unlink()
    now = 12.0
    assert key.value == "newer"


def request(api: Any, **fields: object) -> UpstreamRequest:
    return UpstreamRequest(json.dumps({"model": "m", **fields}).encode(), api)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("text", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ([], 1), (None, 1), (["only"], 1)],
)
def test_each_prompt_has_its_choices(prompt: object, prompts: int) -> None:
    assert request("completions", prompt=prompt).choices == prompts
    assert request("completions", prompt=prompt, n=3).choices == 3 * prompts
    assert request("chat", prompt=prompt, n=3).choices == 3


@pytest.mark.parametrize("n", [0, 129, -1])
def test_choices_have_a_bound(n: int) -> None:
    with pytest.raises(InvalidRequestError, match="n must be"):
        request("chat", n=n)


def test_what_limits_are_charged_in_advance_has_a_bound() -> None:
    assert request("chat", max_tokens=10, n=2).expected_tokens < 40
    assert request("chat", max_tokens=1e300).expected_tokens < 2 << 20
