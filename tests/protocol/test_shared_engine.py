"""Two servers and one engine: the second has no engine of its own, but the door of the first one's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from penstock.gateway.cli import main
from support.adapters import save_adapter
from support.processes import child_pids
from support.server import Server, free_port, serving, wait_until

ASK: list[Any] = [{"role": "user", "content": "Whose engine is this?"}]
QUIET = ("--access-log", "off")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Where the door is, and the key to it, as flags of both sides say it."""
    key = tmp_path_factory.mktemp("key") / "engine.key"
    assert main(["key", "new", "--engine", "--file", str(key)]) == 0
    return f"tcp://127.0.0.1:{free_port()}", "--engine-key", str(key)


@pytest.fixture(scope="module")
def owner(address: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    adapters = tmp_path_factory.mktemp("adapters")
    for name in ("first", "second"):
        save_adapter(adapters / name)
    flags = ("--engine", "simulated", "--sim-step-ms", "5", "--drain-timeout", "20")
    lora = ("--lora", f"first={adapters / 'first'}", "--lora-directory", str(adapters))
    with serving(*flags, *lora, *QUIET, "--engine-door", *address) as server:
        yield server


@pytest.fixture(scope="module")
def server(owner: Server, address: tuple[str, ...]) -> Iterator[Server]:
    with serving(*QUIET, "--engine-address", *address) as server:
        yield server


def answer(server: Server, model: str = "penstock-demo") -> str:
    client = server.client()
    done = client.chat.completions.create(model=model, messages=ASK, max_tokens=12, temperature=0)
    return done.choices[0].message.content or ""


def metric(server: Server, name: str) -> float:
    page = httpx.get(server.operator + "/metrics").text
    [line] = [line for line in page.splitlines() if line.startswith(f"penstock_{name}{{")]
    return float(line.rpartition(" ")[2])


def ready(server: Server) -> bool:
    return httpx.get(server.url + "/v2/health/ready").status_code == 200


def test_both_servers_say_the_same(owner: Server, server: Server) -> None:
    assert answer(server) == answer(owner)
    assert server.process.pid != owner.process.pid
    assert not child_pids(server.process.pid), "it has no engine process"


def test_the_adapters_are_the_owner_s(owner: Server, server: Server) -> None:
    assert answer(server, "first") == answer(owner, "first") != answer(server)
    loaded = owner.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "second"})
    assert loaded.status_code == 200
    wait_until(lambda: "second" in {model.id for model in server.client().models.list()})
    assert answer(server, "second") == answer(owner, "second")
    assert owner.post("/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 200
    wait_until(lambda: "second" not in {model.id for model in server.client().models.list()})
    refused = server.post("/v1/load_lora_adapter", {"lora_name": "third", "lora_path": "second"})
    assert refused.status_code == 403


def test_metrics_show_the_engine_as_its_owner_s_do(owner: Server, server: Server) -> None:
    for name in ("engine_admitted_total", "kv_cache_blocks", "engine_steps_total"):
        wait_until(lambda name=name: metric(server, name) == metric(owner, name) > 0)
    assert metric(server, "engine_ready") == 1
    assert 0 <= metric(server, "engine_heartbeat_age_seconds") < 10
    assert metric(server, "step_duration_seconds_count") > 0


def test_the_engine_dies_and_comes_back(owner: Server, server: Server) -> None:
    with server.stream("/v1/completions", {"model": "penstock-demo", "prompt": "hi", "max_tokens": 4000}) as events:
        next(events)
        os.kill(owner.engine_pid(), signal.SIGKILL)
        rest = list(events)
    assert [event["error"]["code"] for event in rest[:-1] if "error" in event] == ["engine_dead"]
    assert rest[-1] == "[DONE]"
    assert httpx.get(server.url + "/v2/health/live").status_code == 200
    wait_until(lambda: ready(server))
    assert answer(server) == answer(owner)


def test_an_owner_that_is_stopped_lets_the_others_end_what_they_have_begun(owner: Server, server: Server) -> None:
    ended: list[Any] = []

    def read(events: Iterator[Any]) -> None:
        ended.extend(events)

    with server.stream("/v1/completions", {"model": "penstock-demo", "prompt": "hi", "max_tokens": 300}) as events:
        next(events)
        reader = threading.Thread(target=read, args=(events,))
        reader.start()
        owner.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not ready(server))
        with pytest.raises(openai.InternalServerError) as refused:
            answer(server)
        assert refused.value.status_code == 503
        reader.join(30)
    assert ended[-1] == "[DONE]"
    assert not [event for event in ended[:-1] if "error" in event]
    assert owner.process.wait(30) == 0
