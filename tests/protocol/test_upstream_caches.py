"""Upstream servers that tell what they have cached: two of our own, behind a real server."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

import penstock.gateway
from support.server import Server, free_port, serving, wait_until

DEMO = Path(penstock.gateway.__file__).parent / "demo_model"
WORDS = "The cat sat on the mat and looked at the moon while the boat went down the river to the sea. "


class Fleet(NamedTuple):
    front: Server
    inner: list[Server]

    def blocks(self, number: int) -> float:
        """That the server says it has."""
        return self.metric("kv_blocks", number)

    def metric(self, name: str, number: int, more: str = "") -> float:
        text = httpx.get(self.front.url + "/metrics").text
        server = re.escape(self.inner[number].url.removeprefix("http://") + "/v1")
        match = re.search(rf'penstock_upstream_{name}{{{more}model="m",server="{server}"}} (\S+)', text)
        return float(match[1]) if match else 0.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    events = [(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}") for _ in range(2)]
    inner = [
        Server(
            *("penstock-demo", "--engine", "simulated", "--served-model-name", "m", "--sim-step-ms", "1"),
            *("--kv-events", endpoint, "--kv-events-replay", replay),
        )
        for endpoint, replay in events
    ]
    try:
        for server in inner:
            server.wait_ready()
        settings = {
            "name": "m",
            "url": [server.url for server in inner],
            "kv_events": [{"endpoint": endpoint, "replay_endpoint": replay} for endpoint, replay in events],
            "tokenizer": str(DEMO),
        }
        config = tmp_path_factory.mktemp("caches") / "penstock.yaml"
        config.write_text(json.dumps({"upstream": [settings]}))
        ask(inner[1], "/v1/completions", prompt="Known before the front came. " + WORDS * 3)
        with serving("--config", str(config)) as front:
            running = Fleet(front, inner)
            wait_until(lambda: all(running.metric("kv_events_live", number) for number in range(2)))
            yield running
    finally:
        for server in inner:
            server.close()


def ask(server: Server, path: str, **fields: Any) -> int:
    """How many tokens of its prompt were cached."""
    answer = server.post(path, {"model": "m", "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_goes_where_it_is_cached_whoever_sent_it_there(fleet: Fleet) -> None:
    """Other ways to choose would take turns, as this server has sent them nowhere."""
    assert ask(fleet.front, "/v1/completions", prompt="Known before the front came. " + WORDS * 3) > 32
    for number in range(4):
        chat = {"messages": [{"role": "user", "content": f"Number {number}: {WORDS * 3}"}]}
        server = number % 2
        before = fleet.blocks(server)
        ask(fleet.inner[server], "/v1/chat/completions", **chat)
        wait_until(lambda server=server, before=before: fleet.blocks(server) > before + 2)  # type: ignore[misc]
        assert ask(fleet.front, "/v1/chat/completions", **chat) > 32
    assert fleet.metric("routed_tokens_total", 0, 'cached="events",') > 64


def test_an_engine_that_was_restarted_has_nothing_cached(fleet: Fleet) -> None:
    wait_until(lambda: fleet.blocks(0) > 0)
    server = fleet.inner[0]
    os.kill(server.engine_pid(), signal.SIGKILL)
    wait_until(lambda: fleet.metric("kv_events_losses_total", 0) == 1)
    server.wait_ready()
    wait_until(lambda: fleet.metric("kv_events_live", 0) == 1)
    assert (fleet.blocks(0), fleet.blocks(1) > 0) == (0, True)
