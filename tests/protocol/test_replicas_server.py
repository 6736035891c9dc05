"""A server with replicas of its model: one is killed while clients read, and they read on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.server import Server, serving, wait_until

STREAMS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--engine", "simulated", "--replicas", "2", "--sim-step-ms", "10") as running:
        yield running


def bodies() -> list[dict[str, Any]]:
    """Greedy and random streams, chats and completions, some of them with several choices."""
    chance, found = random.Random(3), []
    for k in range(STREAMS):
        body: dict[str, Any] = {"model": "penstock-demo", "max_tokens": chance.randint(60, 200), "stream": True}
        body |= {"temperature": 0} if k % 2 else {"temperature": 1, "seed": k}
        body |= {"n": 2} if k % 5 == 0 else {}
        text = f"{k} " + "word " * chance.randint(1, 60)
        found.append(body | ({"prompt": text} if k % 3 else {"messages": [{"role": "user", "content": text}]}))
    return found


async def read(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> dict[int, str]:
    """The text of each choice; the stream ends as it should."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    texts: dict[int, str] = {}
    reasons = []
    async with client.stream("POST", url + path, json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line[6:])["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            reasons.append(choice["finish_reason"])
    assert len(reasons) - reasons.count(None) == body.get("n", 1), "each choice ends once"
    return texts


def engines(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


async def read_all(server: Server, *, kill: bool = False) -> list[dict[int, str]]:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        reading = [asyncio.create_task(read(client, server.url, body)) for body in bodies()]
        if kill:
            await asyncio.to_thread(wait_until, lambda: server.state()["num_running"] > 5)
            os.kill(engines(server)[0].pid, signal.SIGKILL)
        return await asyncio.gather(*reading)


async def test_clients_read_on_when_a_replica_is_killed(server: Server) -> None:
    undisturbed = await read_all(server)
    assert await read_all(server, kill=True) == undisturbed
    moves = server.state()["moves"]
    assert moves["resumed"] > 0
    assert moves["given_up"] == 0
    await asyncio.to_thread(wait_until, lambda: all(each["ready"] for each in server.state()["replicas"]))
    assert [each["restarts"] for each in server.state()["replicas"]] in ([0, 1], [1, 0])


def test_operators_see_each_replica(server: Server) -> None:
    server.post("/v1/completions", {"model": "penstock-demo", "prompt": "a", "max_tokens": 1, "user": "u"})
    state = server.state()
    assert [each["replica"] for each in state["replicas"]] == [0, 1]
    assert state["num_blocks"] == sum(each["stats"]["num_blocks"] for each in state["replicas"])
    metrics = httpx.get(server.operator + "/metrics").text
    assert 'penstock_replica_ready{model="penstock-demo",replica="1"} 1.0' in metrics
    assert "penstock_replica_routed_total" in metrics
    assert server.wait_for_log(r"2 replicas \(routing: prefix; resume: on\)")


def test_one_replica_whose_streams_wait_for_its_restart() -> None:
    with serving("--engine", "simulated", "--resume", "on", "--sim-step-ms", "20") as server:
        body = {"model": "penstock-demo", "prompt": "one", "max_tokens": 60, "temperature": 0}
        undisturbed = server.post("/v1/completions", body).json()
        with server.stream("/v1/completions", body) as events:
            texts = [next(events)["choices"][0]["text"]]
            os.kill(server.engine_pid(), signal.SIGKILL)
            texts += [event["choices"][0]["text"] for event in events if event != "[DONE]"]
        assert "".join(texts) == undisturbed["choices"][0]["text"]
        assert server.state()["moves"]["resumed"] == 1


def test_replicas_in_other_servers(tmp_path: Path) -> None:
    """Two servers with an engine each, and one without: it reads on when one of them is gone."""
    doors = []
    with ExitStack() as running:
        owners = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir(mode=0o700)
            doors.append(f"ipc://{tmp_path / name}/door")
            owners.append(Server("--engine", "simulated", "--sim-step-ms", "20", "--engine-door", doors[-1]))
            running.callback(owners[-1].close)
        flags = [part for door in doors for part in ("--replica-address", door)]
        front = running.enter_context(serving("--replicas", "0", *flags))
        wait_until(lambda: all(each["ready"] for each in front.state()["replicas"]))
        body = {"model": "penstock-demo", "prompt": "one", "max_tokens": 60, "temperature": 0}
        undisturbed = front.post("/v1/completions", body).json()
        with front.stream("/v1/completions", body) as events:
            texts = [next(events)["choices"][0]["text"]]
            [busy] = [n for n, each in enumerate(front.state()["replicas"]) if each["stats"]["num_running"]]
            os.kill(owners[busy].engine_pid(), signal.SIGKILL)
            texts += [event["choices"][0]["text"] for event in events if event != "[DONE]"]
        assert "".join(texts) == undisturbed["choices"][0]["text"]
        assert front.state()["moves"]["resumed"] == 1
