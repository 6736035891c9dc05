"""Penstock behind Ray Serve, on a cluster of two nodes: what clients see, whatever happens to replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from tritonclient.utils import InferenceServerException

from penstock.gateway.ray_serve import application
from ray_serve.cluster import CPUS_OF_A_NODE, SIMULATED, RayCluster
from ray_serve.streams import SteadyLoad, chat, outcomes
from support.server import serving

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two(cluster: RayCluster) -> RayCluster:
    """Two replicas, one on each node: a node has CPUs for one of them."""
    cluster.deploy({"replicas": 2, "cpus": CPUS_OF_A_NODE - 2})
    return cluster


async def test_a_stream_is_that_of_a_server_of_its_own(two: RayCluster) -> None:
    with serving("--engine=simulated", "--served-model-name=m", f"--sim-step-ms={SIMULATED['sim_step_ms']}") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            alone = await chat(client, "What does os.path.join do?")
    async with httpx.AsyncClient(base_url=two.url, timeout=60) as client:
        behind = await chat(client, "What does os.path.join do?")
    assert behind.done
    assert behind.replica
    assert (behind.text, behind.finish_reason, behind.usage) == (alone.text, alone.finish_reason, alone.usage)


async def test_with_openai_s_client(two: RayCluster) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
    async with AsyncOpenAI(base_url=f"{two.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model="m", **asked)
        stream = await client.chat.completions.create(model="m", stream=True, **asked)
        choices = [choice async for chunk in stream for choice in chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
        assert choices[-1].finish_reason == whole.choices[0].finish_reason
        with pytest.raises(NotFoundError) as unknown:
            await client.chat.completions.create(model="other", **asked)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(BadRequestError, match="temperature"):
            await client.chat.completions.create(model="m", stream=True, **asked | {"temperature": 9})


async def test_other_apis(two: RayCluster) -> None:
    async with httpx.AsyncClient(base_url=two.url, timeout=60) as client:
        message = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        assert (await client.post("/v1/messages", json=message)).json()["type"] == "message"
        unknown = await client.post("/v1/messages", json={**message, "model": "other"})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
        unknown = await client.post("/api/chat", json={**message, "model": "other"})
        assert (unknown.status_code, type(unknown.json()["error"])) == (404, str)
        answer = await client.post("/v2/models/m/generate", json={"text_input": "Hi", "max_tokens": 4})
        assert answer.json()["text_output"]
        refused = await client.post("/v2/repository/models/m/unload", json={})
        assert refused.status_code == 501
        assert "only the replica" in refused.json()["error"]
        assert (await client.get("/health/ready")).status_code == 200


@contextmanager
def generating(cluster: RayCluster, max_tokens: int) -> Iterator[Iterator[Any]]:
    """The answers of a stream over gRPC; they raise what has ended it."""
    got: Queue[tuple[Any, Exception | None]] = Queue()
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"Hi"], np.object_))
    streamed = triton.InferInput("stream", [1], "BOOL")
    streamed.set_data_from_numpy(np.array([True]))

    def answers() -> Iterator[Any]:
        is_last = False
        while not is_last:
            result, error = got.get(timeout=120)
            if error is not None:
                raise error
            yield result.as_numpy("text_output")
            is_last = result.get_response().parameters["triton_final_response"].bool_param

    with triton.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}") as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        asked = {"max_tokens": max_tokens, "ignore_eos": True}
        client.async_stream_infer("m", [text, streamed], parameters=asked, enable_empty_final_response=True)
        yield answers()


def test_kserve_over_grpc(two: RayCluster) -> None:
    with generating(two, 4) as answers:
        assert sum(text is not None and bool(text[0]) for text in answers) > 1
    client = triton.InferenceServerClient(f"127.0.0.1:{two.grpc_port}")
    assert client.is_server_live()
    assert client.is_model_ready("m")
    text = triton.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"Hi"], np.object_))
    assert client.infer("m", [text], parameters={"max_tokens": 4}).as_numpy("text_output")[0]
    with pytest.raises(InferenceServerException, match=r"StatusCode\.NOT_FOUND"):
        client.get_model_metadata("no such model")
    with pytest.raises(InferenceServerException, match="only the replica"):
        client.unload_model("m")


async def test_a_killed_replica_ends_its_streams_with_an_event(two: RayCluster) -> None:
    load = SteadyLoad(two.url, 24, max_tokens=150)
    await load.wait_for(24)
    before = {process.pid for process in two.replicas()}
    two.kill(two.replicas()[0])
    await load.wait_for(48)
    found = outcomes(await load.stop())
    assert found["cut"] == 0
    assert 1 <= found["error"] <= 24
    told = Counter(each.error["code"] for each in load.ended if each.error is not None)
    assert set(told) == {"engine_dead"}
    two.wait_for(lambda: len({process.pid for process in two.replicas()} - before) == 1)
    two.wait_for_replicas(2)


async def test_all_replicas_are_killed(two: RayCluster) -> None:
    """Streams over gRPC end with a status, and requests wait for a new replica."""
    load = SteadyLoad(two.url, 8, max_tokens=150)
    await load.wait_for(8)
    with generating(two, 2000) as answers:
        await asyncio.to_thread(next, answers)
        for replica in two.replicas():
            two.kill(replica)
        with pytest.raises(InferenceServerException, match="StatusCode"):
            await asyncio.to_thread(list, answers)
    await load.wait_for(16)
    found = outcomes(await load.stop())
    assert found["cut"] == 0
    assert 1 <= found["error"] <= 8
    two.wait_for_replicas(2)


async def test_a_lost_node_ends_its_streams_with_an_event(two: RayCluster) -> None:
    assert two.replicas_of_second_node()
    load = SteadyLoad(two.url, 24, max_tokens=150)
    await load.wait_for(24)
    two.remove_node()
    await load.wait_for(72)
    found = outcomes(await load.stop())
    two.add_node()
    assert found["cut"] == 0
    assert 1 <= found["error"] <= 24
    two.wait_for_replicas(2)


async def test_scaling_up_and_down_fails_nothing(cluster: RayCluster) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "upscale_delay_s": 1, "downscale_delay_s": 2}
    await asyncio.to_thread(cluster.deploy, {"autoscaling": scaling}, max_num_seqs=8)
    cluster.wait_for(lambda: len(cluster.replicas()) == 1)
    light = SteadyLoad(cluster.url, 2)
    heavy = SteadyLoad(cluster.url, 40)
    await _until(lambda: len(cluster.replicas()) == 3)
    await heavy.wait_for(40)
    ended = await heavy.stop()
    await _until(lambda: len(cluster.replicas()) == 1)
    await light.wait_for(4)
    ended += await light.stop()
    assert outcomes(ended) == {"finished": len(ended)}
    assert len({each.replica for each in ended}) == 3


async def _until(condition) -> None:
    async with asyncio.timeout(150):
        while not condition():
            await asyncio.sleep(0.2)


async def converse(url: str) -> tuple[dict[int, set[str]], float]:
    """Some conversations, whose turns mix: where each has been, and which share of all prompts was cached."""
    homes: dict[int, set[str]] = {number: set() for number in range(8)}
    cached = prompt = 0
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for turn in range(4):
            for number in homes:
                said = [
                    {"role": "user", "content": f"conversation {number}, turn {each}: " + "some words " * 60}
                    for each in range(turn + 1)
                ]
                ended = await chat(client, "", 4, messages=said)
                homes[number].add(ended.replica)
                cached += ended.usage["prompt_tokens_details"]["cached_tokens"]
                prompt += ended.usage["prompt_tokens"]
    return homes, cached / prompt


async def test_conversations_stay_where_they_are(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all replicas have some. What a conversation said before is not computed again."""
    await asyncio.to_thread(cluster.deploy, {"replicas": 3})
    cluster.wait_for_replicas(3)
    homes, share = await converse(cluster.url)
    assert all(len(replicas) == 1 for replicas in homes.values())
    assert len(set.union(*homes.values())) == 3
    monkeypatch.setattr(application, "_ROUTER", "ray_serve.round_robin:RoundRobinRouter")
    await asyncio.to_thread(cluster.deploy_here, {"replicas": 3})
    cluster.wait_for_replicas(3)
    _, in_turns = await converse(cluster.url)
    print(f"cached share of prompts: {share:.0%} by prefix, {in_turns:.0%} in turns")
    assert share >= 1.5 * in_turns
