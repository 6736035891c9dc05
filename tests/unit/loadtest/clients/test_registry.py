"""Every protocol has a client, and refuses what it has no place for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from penstock.loadtest.clients.settings import CLIENTS, client_options, make_client
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import PROTOCOLS, Target

TENSORS = {"kserve-http", "kserve-http-binary", "kserve-grpc"}
NEVER_STREAMED = {*TENSORS, "openai-embeddings"}


def target_of(protocol: str, **settings: Any) -> Target:
    return msgspec.convert({"url": "localhost:1", "model": "m", "protocol": protocol} | settings, Target)


def test_all_protocols_have_a_client() -> None:
    assert set(CLIENTS) == set(PROTOCOLS)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_clients_can_be_made(protocol: str) -> None:
    make_client(target_of(protocol), keep_text=True, seed=3)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_options_without_a_place(protocol: str) -> None:
    cases: list[tuple[dict[str, Any], bool, str]] = [
        ({"input_tensor": ["X:FP32:1"]}, protocol in TENSORS, "input-tensor"),
        ({"batch_size": 2}, protocol in NEVER_STREAMED, "batch-size"),
        ({"stream": False}, protocol not in {*NEVER_STREAMED, "kserve-grpc-stream"}, "stream"),
        ({"keep_alive": False}, "grpc" not in protocol, "keep-alive"),
        ({"verify_tls": False}, "grpc" not in protocol, "verify-tls"),
        ({"end_mark": False}, protocol in {"openai-chat", "openai-completions"}, "end-mark"),
        ({"ignore_eos": False}, True, ""),
    ]
    for settings, has, name in cases:
        if has:
            make_client(target_of(protocol, **settings))
        else:
            with pytest.raises(LoadTestError, match=name):
                make_client(target_of(protocol, **settings))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"extra": "["}, "extra"),
        ({"extra": "[]"}, "extra"),
        ({"extra": '{"stream": false}'}, "stream"),
        ({"header": ["X"]}, "header"),
        ({"header": [": x"]}, "header"),
        ({"header": ["X Y: z"]}, "header"),
        ({"header": ["X: a\r\nY: b"]}, "header"),
        ({"header": ["X(y): z"]}, "header"),
        ({"header": ["X: a", "x: b"]}, "twice"),
        ({"api_key": "a\nb"}, "api-key"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(LoadTestError, match=name):
        client_options(target_of("openai-chat", **settings))


def test_the_key_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from outside")
    assert client_options(target_of("openai-chat")).api_key == "from outside"
    assert client_options(target_of("openai-chat", api_key="own")).api_key == "own"
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert client_options(target_of("openai-chat")).api_key is None


def test_clients_of_the_openai_api_load_neither_numpy_nor_grpc() -> None:
    code = (
        "import sys; from penstock.loadtest.clients.settings import make_client;"
        "from penstock.loadtest.options import Target;"
        "[make_client(Target(url='h', protocol=p)) for p in ('openai-chat', 'openai-responses', 'kserve-generate')];"
        "print(sorted({'numpy', 'grpc', 'tritonclient', 'penstock.gateway', 'penstock.engines'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("protocol", "url", "base"),
    [
        ("openai-chat", "http://h:1/v1", "http://h:1"),
        ("openai-completions", "http://h:1/up/v1/", "http://h:1/up"),
        ("openai-chat", "http://h:1", "http://h:1"),
        ("kserve-http", "http://h:1/v1", "http://h:1/v1"),
    ],
)
def test_addresses_as_the_openai_sdk_takes_them(protocol: str, url: str, base: str) -> None:
    assert client_options(target_of(protocol, url=url)).url == base
