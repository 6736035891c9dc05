"""vLLM in a server process, under either scheduler. Only where vLLM is installed."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server import Server, serving, wait_until

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(500),
]
FLAGS = ("--engine", "vllm", "--threads", "1", "--dtype", "f32", "--kv-cache-memory", "64MiB", "--max-num-seqs", "4")
COMPLETIONS = "/v1/completions"
SECONDS_TO_AN_ERROR = 20.0
"""On a machine that is busy; the watchdog would take a minute."""


def body(max_tokens: int) -> dict[str, Any]:
    return {"prompt": [[300, 301, 302]], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}


def last_event(server: Server, begun: list[int], number: int) -> tuple[Any, float]:
    """What ends a long stream but for [DONE], and when."""
    with server.stream(COMPLETIONS, body(700) | {"model": "penstock-demo"}) as events:
        begun.append(number)
        *_, last, done = events
        assert done == "[DONE]"
        return last, time.monotonic()


@pytest.mark.parametrize("scheduler", ["penstock", "engine"])
def test_kill_9_under_load_ends_every_stream_soon_and_leaks_nothing(scheduler: str) -> None:
    """Four run and wait for tokens, four have seen none yet: they stand in the queue and get a status instead."""
    with serving(*FLAGS, "--scheduler", scheduler) as server, ThreadPoolExecutor(8) as threads:
        begun: list[int] = []
        running = [threads.submit(last_event, server, begun, number) for number in range(4)]
        wait_until(lambda: len(begun) == 4)
        queued = [threads.submit(server.post, COMPLETIONS, body(8) | {"model": "penstock-demo"}) for _ in range(4)]
        wait_until(lambda: server.state()["num_waiting"] == 4)
        os.kill(server.engine_pid(), signal.SIGKILL)
        killed = time.monotonic()
        for last, when in (future.result() for future in running):
            assert last["error"]["code"] == "engine_dead"
            assert when - killed < SECONDS_TO_AN_ERROR
        assert {future.result().status_code for future in queued} <= {500, 503}
        wait_until(lambda: httpx.get(server.url + "/health/ready").status_code == 200, 60)
        assert server.post(COMPLETIONS, body(8) | {"model": "penstock-demo"}).status_code == 200
        wait_until(server.is_idle)
        state = server.state()
        assert state["admitted"] == sum(state["finished"].values())


def answer(server: Server, prompt: list[int], max_tokens: int) -> tuple[str, int]:
    """Its text, and how many tokens of the prompt were found."""
    wanted = body(max_tokens) | {"model": "penstock-demo", "prompt": [prompt]}
    found = server.post(COMPLETIONS, wanted).raise_for_status().json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_kv_connector_of_vllm_finds_what_another_server_has_computed(tmp_path: Path) -> None:
    """In the bounds that docs/disaggregation.md gives: the prompt is computed in one step."""
    store = {"shared_storage_path": str(tmp_path)}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": store}
    engine_args = json.dumps({"kv_transfer_config": connector})
    flags = (*FLAGS, "--scheduler", "engine", "--max-num-batched-tokens", "2048", "--engine-args", engine_args)
    prompt = [300 + (7 * n + n * n) % 3000 for n in range(400)]
    with serving(*flags, seconds=200) as prefill, serving(*flags, seconds=200) as decode:
        assert answer(prefill, prompt, 1)[1] == 0
        text, found = answer(decode, prompt, 24)
        assert found == 384, "all full blocks of 32"
        assert answer(prefill, prompt, 24)[0] == text, "of its own keys and values"
