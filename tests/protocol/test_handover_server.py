"""A server whose replicas divide the work: one computes prompts, the other one goes on with its keys and values."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from support.server import OPENVINO, VLLM, WITH_VLLM, Server, serving, wait_until

TEXT = " ".join(f"word{k} and more of it" for k in range(60))
STREAMS = 6


@pytest.fixture(scope="module", params=[OPENVINO, pytest.param(VLLM, marks=WITH_VLLM)], ids=["openvino", "vllm"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = ("--dtype", "f32", "--replicas", "2", "--prefill-replicas", "1")
    with serving(*request.param, *flags, seconds=200) as running:
        yield running


def bodies(first: int) -> list[dict[str, Any]]:
    """Prompts that begin differently; greedy and random, and one with two choices."""
    common = {"model": "penstock-demo", "max_tokens": 20, "logprobs": 1}
    found = [common | {"prompt": f"{k} {TEXT}", "temperature": 0} for k in range(first, first + STREAMS)]
    return [*found, common | {"prompt": f"{first} - {TEXT}", "temperature": 1, "seed": 7, "n": 2}]


async def ask_all(server: Server, wanted: list[dict[str, Any]], *, kill: bool = False) -> list[Any]:
    """Of each, and of each of its choices: what the client sees."""
    before = figures(server)[0]["admitted"]
    async with httpx.AsyncClient(timeout=120) as client:
        asked = [asyncio.create_task(client.post(server.url + "/v1/completions", json=body)) for body in wanted]
        if kill:
            await asyncio.to_thread(wait_until, lambda: figures(server)[0]["admitted"] > before)
            os.kill(prefill(server).pid, signal.SIGKILL)
        answers = [response.raise_for_status().json() for response in await asyncio.gather(*asked)]
        return [(counted(answer["usage"]), [seen(choice) for choice in answer["choices"]]) for answer in answers]


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    """Without what was cached: of a prompt that was cut off, the other one finds a part."""
    return usage["prompt_tokens"], usage["completion_tokens"]


def seen(choice: dict[str, Any]) -> Any:
    """In f32 the tokens do not depend on who computes what beside them; the last digits of a logprob do."""
    logprobs = choice["logprobs"]
    rounded = [round(number, 2) for number in logprobs["token_logprobs"]]
    return choice["index"], choice["text"], choice["finish_reason"], logprobs["tokens"], rounded


def figures(server: Server) -> list[dict[str, Any]]:
    return [each["stats"] for each in server.state()["replicas"]]


def prefill(server: Server) -> psutil.Process:
    """The first engine that was started."""
    return min(psutil.Process(server.process.pid).children(), key=lambda process: process.create_time())


async def test_answers_are_those_of_one_engine_alone(server: Server) -> None:
    handed = await ask_all(server, bodies(0))
    first, second = figures(server)
    asked = sum(prompt for (prompt, _), _ in handed)
    assert first["prompt_tokens"] >= asked
    assert second["prompt_tokens"] < asked / 10, "the other one has computed next to nothing of them"
    assert second["handover_loaded"] == first["handover_saved"]
    assert second["handover_missed_tokens"] == second["handover_lost"] == 0
    assert server.state()["moves"]["handed_over"] == STREAMS + 2
    assert [each["role"] for each in server.state()["replicas"]] == ["prefill", "decode"]
    metrics = await asyncio.to_thread(lambda: httpx.get(server.operator + "/metrics").text)
    assert f'penstock_replica_handovers_total{{model="penstock-demo"}} {STREAMS + 2}.0' in metrics
    assert 'penstock_replica_handover_bytes{model="penstock-demo",replica="0"}' in metrics
    assert 'penstock_replica_handover_loaded_blocks_total{model="penstock-demo",replica="1"}' in metrics

    server.post("/reset_prefix_cache", {}).raise_for_status()
    assert await ask_all(server, bodies(0), kill=True) == handed, "the other one computes what the dead one has not"
    assert server.state()["moves"]["given_up"] == 0
    await asyncio.to_thread(wait_until, lambda: all(each["ready"] for each in server.state()["replicas"]), 120)
    before = server.state()["moves"]["handed_over"]
    await ask_all(server, bodies(100))
    assert server.state()["moves"]["handed_over"] == before + STREAMS + 2
