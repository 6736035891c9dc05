"""The load test's clients against real servers: what they count is what the server counts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.loadtest.clients.base import Client
from penstock.loadtest.clients.discover import only_model
from penstock.loadtest.clients.settings import make_client
from penstock.loadtest.errors import TIMEOUT, LoadTestError
from penstock.loadtest.messages import Answer, Call
from penstock.loadtest.options import Target
from support.server import Server, serving, wait_until

MODELS = Path(__file__).parents[2] / "examples" / "model_repository"
PROMPT = "The quick brown fox jumps over the lazy dog."
LANGUAGE = ("openai-chat", "openai-completions", "kserve-generate", "kserve-grpc-stream")
TENSORS = ("kserve-http", "kserve-http-binary", "kserve-grpc")
TOKENS = 12
GREEDY = {
    protocol: '{"sampling_parameters": {"temperature": 0}}' if "kserve" in protocol else '{"temperature": 0}'
    for protocol in (*LANGUAGE, "openai-responses")
}
"""What makes answers to the same prompt the same."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A simulated language model. It computes all of each prompt, as its count of prompt tokens leaves out the rest."""
    with serving("--engine", "simulated", "--sim-step-ms", "10", "--no-prefix-caching") as server:
        yield server


@pytest.fixture(scope="module")
def repository() -> Iterator[Server]:
    """Models of tensors."""
    flags = ("--model-control-mode=explicit", "--load-model=add_sub", "--load-model=repeat")
    with serving("--model-repository", str(MODELS), *flags) as server:
        yield server


def client_of(server: Server, protocol: str, *, keep_text: bool = False, **settings: Any) -> Client:
    url = server.grpc if "grpc" in protocol else server.url
    target = msgspec.convert({"url": url, "protocol": protocol, "model": "penstock-demo"} | settings, Target)
    return make_client(target, keep_text=keep_text)


async def answers(client: Client, number: int = 1, **fields: Any) -> list[Answer]:
    """Of so many calls at a time."""
    await client.open()
    try:
        calls = [Call(index=n, **{"prompt": PROMPT, "output_tokens": TOKENS} | fields) for n in range(number)]
        return list(await asyncio.gather(*map(client.send, calls)))
    finally:
        await client.close()


def counted(server: Server, metric: str, **labels: str) -> float:
    """The sum of a counter over its other labels."""
    text = httpx.get(server.operator + "/metrics").text
    found = [
        float(value)
        for given, value in re.findall(rf"^{metric}(\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.MULTILINE)
        if all(f'{name}="{label}"' in given for name, label in labels.items())
    ]
    assert found, metric
    return sum(found)


def idle(server: Server) -> bool:
    state = server.state()
    return bool(state["num_running"] == state["num_waiting"] == 0)


@pytest.mark.parametrize("protocol", LANGUAGE)
async def test_tokens_of_streams_are_those_that_the_server_counts(server: Server, protocol: str) -> None:
    before = [counted(server, f"penstock_{kind}_tokens_total") for kind in ("prompt", "generation")]
    found = await answers(client_of(server, protocol, keep_text=True), 5)
    for answer in found:
        assert answer.error == "", answer.detail
        assert answer.output_tokens == TOKENS
        assert 2 <= len(answer.arrivals) <= TOKENS
        assert sum(answer.pieces or [TOKENS]) == TOKENS
        assert answer.sent < answer.arrivals[0] < answer.arrivals[-1] <= answer.ended
        assert answer.arrivals == sorted(answer.arrivals)
        assert answer.text
    prompt, output = (counted(server, f"penstock_{kind}_tokens_total") for kind in ("prompt", "generation"))
    assert prompt - before[0] == sum(answer.prompt_tokens or 0 for answer in found)
    assert output - before[1] == sum(answer.output_tokens or 0 for answer in found)


@pytest.mark.parametrize("protocol", ["openai-chat", "openai-responses", "openai-completions", "kserve-generate"])
async def test_whole_answers(server: Server, protocol: str) -> None:
    [answer] = await answers(client_of(server, protocol, stream=False, keep_text=True, extra=GREEDY[protocol]))
    assert (answer.error, answer.output_tokens) == ("", TOKENS)
    assert answer.arrivals == [], "it has no first token"
    assert answer.text
    [streamed] = await answers(client_of(server, protocol, keep_text=True, extra=GREEDY[protocol]))
    assert streamed.text == answer.text
    assert streamed.prompt_tokens == answer.prompt_tokens


async def test_all_protocols_of_completion_say_the_same(server: Server) -> None:
    protocols = ("openai-completions", "kserve-generate", "kserve-grpc-stream")
    clients = [client_of(server, protocol, keep_text=True, extra=GREEDY[protocol]) for protocol in protocols]
    found = [(await answers(client))[0] for client in clients]
    assert len({(answer.text, answer.prompt_tokens, answer.output_tokens) for answer in found}) == 1


@pytest.mark.parametrize("protocol", LANGUAGE)
async def test_cancelling_ends_the_request_in_the_server(server: Server, protocol: str) -> None:
    client = client_of(server, protocol)
    await client.open()
    sending = asyncio.create_task(client.send(Call(index=0, prompt=PROMPT, output_tokens=1000)))
    await asyncio.to_thread(wait_until, lambda: not idle(server))
    aborted = server.state()["finished"].get("abort", 0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await asyncio.to_thread(wait_until, lambda: idle(server))
    assert server.state()["finished"]["abort"] == aborted + 1
    await client.close()


@pytest.mark.parametrize("protocol", LANGUAGE)
async def test_time_runs_out(server: Server, protocol: str) -> None:
    [answer] = await answers(client_of(server, protocol, request_timeout=0.3), output_tokens=2000)
    assert answer.error == TIMEOUT
    await asyncio.to_thread(wait_until, lambda: idle(server))


@pytest.mark.parametrize(
    ("protocol", "error"),
    [
        ("openai-chat", "http_400"),
        ("openai-completions", "http_400"),
        ("kserve-generate", "http_400"),
        ("kserve-grpc-stream", "stream_error"),
    ],
)
async def test_what_the_server_refuses(server: Server, protocol: str, error: str) -> None:
    [answer] = await answers(client_of(server, protocol), prompt=PROMPT * 10_000)
    assert answer.error == error
    assert answer.detail


async def test_a_protocol_that_the_model_does_not_have(server: Server) -> None:
    [answer] = await answers(client_of(server, "openai-embeddings"))
    assert answer.error == "http_400", "a model that generates gives no embeddings"


@pytest.mark.parametrize("protocol", ["kserve-generate", "kserve-grpc-stream", *TENSORS])
async def test_a_model_that_is_not_there(server: Server, protocol: str) -> None:
    with pytest.raises(LoadTestError, match="nobody"):
        await answers(client_of(server, protocol, model="nobody"))


async def test_sampling_parameters_can_be_added(server: Server) -> None:
    for protocol in ("kserve-generate", "kserve-grpc-stream"):
        extra = '{"sampling_parameters": {"max_tokens": 3}, "return_num_output_tokens": null}'
        [answer] = await answers(client_of(server, protocol, extra=extra))
        assert (answer.error, answer.output_tokens, answer.pieces) == ("", None, [])
        assert 0 < len(answer.arrivals) <= 3


async def test_the_only_model(server: Server) -> None:
    assert await only_model(Target(url=server.url)) == "penstock-demo"


@pytest.mark.parametrize("protocol", TENSORS)
async def test_tensors_from_the_metadata(repository: Server, protocol: str) -> None:
    before = counted(repository, "nv_inference_count", model="add_sub")
    found = await answers(client_of(repository, protocol, model="add_sub", batch_size=2), 40)
    assert {(answer.error, answer.detail) for answer in found} == {("", "")}
    assert {answer.output_tokens for answer in found} == {0}
    assert all(answer.sent < answer.ended and not answer.arrivals for answer in found)
    assert counted(repository, "nv_inference_count", model="add_sub") - before == 80, "two rows of each request"


@pytest.mark.parametrize("protocol", TENSORS)
async def test_tensors_of_ones_own(repository: Server, protocol: str) -> None:
    inputs = ("INPUT0:FP32:1,16", "INPUT1:FP32:1,16")
    [answer] = await answers(client_of(repository, protocol, model="add_sub", input_tensor=inputs))
    assert answer.error == ""
    [answer] = await answers(client_of(repository, protocol, model="add_sub", input_tensor=inputs[:1]))
    assert answer.error == ("grpc_INVALID_ARGUMENT" if protocol == "kserve-grpc" else "http_400")
    assert "INPUT1" in answer.detail or "input" in answer.detail


@pytest.mark.parametrize("protocol", TENSORS)
async def test_a_model_that_only_streams(repository: Server, protocol: str) -> None:
    [answer] = await answers(client_of(repository, protocol, model="repeat"))
    assert answer.error == ("grpc_UNIMPLEMENTED" if protocol == "kserve-grpc" else "http_501")


async def test_a_model_that_is_no_language_model(repository: Server) -> None:
    for protocol in ("kserve-generate", "kserve-grpc-stream"):
        with pytest.raises(LoadTestError, match="text_input"):
            await answers(client_of(repository, protocol, model="add_sub"))


async def test_an_engine_that_fails_in_the_midst() -> None:
    """What fails with a status is no stream that failed, and each of them is one in the server's books."""
    with serving("--engine", "simulated", "--sim-faults", "raise=1000", "--sim-step-ms", "3") as server:
        failed = Call(index=0, prompt=[5, 1000, 6], output_tokens=4)
        client = client_of(server, "openai-completions")
        found = [await client.send(call) for call in (failed, msgspec.structs.replace(failed, prompt=[5, 6]))]
        await client.close()
        assert [answer.error for answer in found] == ["http_500", ""]
        assert found[0].detail
        finished = "penstock_requests_finished_total"
        assert counted(server, finished, finish_reason="error:step_failed") == 1
        assert counted(server, finished, finish_reason="length") == 1


async def test_an_engine_that_dies_in_the_midst() -> None:
    with serving("--engine", "simulated", "--sim-step-ms", "20") as server:
        clients = [client_of(server, protocol) for protocol in LANGUAGE]
        for client in clients:
            await client.open()
        call = Call(index=0, prompt=PROMPT, output_tokens=1000)
        sending = [asyncio.create_task(client.send(call)) for client in clients]
        await asyncio.to_thread(wait_until, lambda: server.state()["num_running"] == len(clients))
        await asyncio.to_thread(wait_until, lambda: counted(server, "penstock_generation_tokens_total") > 40)
        os.kill(server.engine_pid(), signal.SIGKILL)
        found = await asyncio.gather(*sending)
        for client in clients:
            await client.close()
    assert [answer.error for answer in found] == ["stream_error"] * 4
    assert all(answer.arrivals and answer.detail for answer in found)


async def test_a_server_that_goes_away() -> None:
    with serving("--engine", "simulated", "--sim-step-ms", "3") as server:
        clients = [client_of(server, protocol) for protocol in LANGUAGE]
        for client in clients:
            await client.open()
            assert (await client.send(Call(index=0, prompt=PROMPT, output_tokens=2))).error == ""
        server.process.kill()
        server.process.wait()
        found = [(await client.send(Call(index=1, prompt=PROMPT, output_tokens=2))).error for client in clients]
        for client in clients:
            await client.close()
    assert found == ["connect", "connect", "connect", "grpc_UNAVAILABLE"]
