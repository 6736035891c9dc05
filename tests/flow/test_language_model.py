"""A language model as a KServe model: the tensors of Triton's vLLM backend over the simulated engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import (
    InvalidRequestError,
    NotReadyError,
    NumericalError,
    PermissionDeniedError,
    UnsupportedError,
)
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.adapters import AdapterSet, new_adapter
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.requests.context import Principal, RequestContext
from support.adapters import save_adapter
from support.dataplane import MARKER, Setup


def text_tensor(name: str, value: str | bytes) -> Tensor:
    return Tensor(name, "BYTES", np.array([value if isinstance(value, bytes) else value.encode()], np.object_))


def infer_request(
    text: str | bytes = "a question", *, sampling: dict[str, Any] | str | None = None, **fields: Any
) -> InferRequest:
    """`fields` that are bools become tensors, the others fields of the request. Sampling is greedy unless it says
    otherwise."""
    inputs = {"text_input": text_tensor("text_input", text)}
    for name in [name for name, value in fields.items() if isinstance(value, bool)]:
        inputs[name] = Tensor(name, "BOOL", np.array([fields.pop(name)]))
    if sampling is not None:
        given = sampling if isinstance(sampling, str) else json.dumps({"temperature": 0} | sampling)
        inputs["sampling_parameters"] = text_tensor("sampling_parameters", given)
    return InferRequest(inputs=inputs, **fields)


def values(response: InferResponse, name: str) -> list[Any]:
    [tensor] = [tensor for tensor in response.outputs or [] if tensor.name == name]
    return [item.decode() if isinstance(item, bytes) else item for item in tensor.array.tolist()]


class Served:
    def __init__(self, folder: Path, answer: str | None = None, **scheduler: Any) -> None:
        self.setup = Setup(folder, SchedulerConfig(**scheduler), 64, answer=answer)
        self.model = LanguageModel(self.setup.plane, self.setup.model, "m", policy="fcfs")

    async def start(self) -> Served:
        await self.setup.engine.start()
        self.setup.model.loaded = True
        return self

    async def stream(self, **fields: Any) -> list[InferResponse]:
        return [response async for response in self.model.stream(infer_request(stream=True, **fields))]

    async def expected(self, **fields: Any) -> str:
        return "".join(delta.text for delta in await self.setup.generate(**fields))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = await Served(tmp_path).start()
    yield served
    served.setup.engine.core.check_integrity()
    assert served.model.statistics.pending == 0
    await served.setup.engine.stop()


async def test_an_answer_stands_behind_its_prompt(served: Served) -> None:
    response = await served.model.infer(infer_request(sampling={"max_tokens": 12}))
    assert values(response, "text_output") == ["a question" + await served.expected(max_tokens=12)]
    assert response.final


@pytest.mark.parametrize("streams", [False, True])
async def test_text_is_shown_as_the_model_wrote_it(tmp_path: Path, streams: bool) -> None:
    answer = "<think>Hm.</think>One moment.<tool>look:{}</tool>"
    served = await Served(tmp_path, answer).start()
    asked = infer_request(stream=streams, exclude_input_in_output=True, sampling={"max_tokens": 100})
    responses = [response async for response in served.model.stream(asked)]
    assert "".join(values(response, "text_output")[0] for response in responses) == answer
    assert (len(responses) > 1) == streams
    await served.setup.engine.stop()


async def test_the_prompt_can_be_left_out(served: Served) -> None:
    response = await served.model.infer(infer_request(exclude_input_in_output=True, sampling={"max_tokens": 12}))
    assert values(response, "text_output") == [await served.expected(max_tokens=12)]


async def test_16_tokens_without_a_word_about_it(served: Served) -> None:
    response = await served.model.infer(infer_request(exclude_input_in_output=True, return_num_output_tokens=True))
    assert values(response, "num_output_tokens") == [16]


async def test_streams_bring_deltas_and_one_end(served: Served) -> None:
    responses = await served.stream(sampling={"max_tokens": 30}, return_finish_reason=True)
    assert "".join(values(response, "text_output")[0] for response in responses) == await served.expected(max_tokens=30)
    assert len(responses) > 5
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    reasons = [values(response, "finish_reason")[0] for response in responses]
    assert reasons == ["None"] * (len(responses) - 1) + ["length"]


async def test_counts_add_up(served: Served) -> None:
    responses = await served.stream(
        sampling={"max_tokens": 20}, return_num_output_tokens=True, return_num_input_tokens=True
    )
    assert sum(values(response, "num_output_tokens")[0] for response in responses) == 20
    assert {values(response, "num_input_tokens")[0] for response in responses} == {
        len(served.setup.tokenizer.encode("a question", True))
    }


async def test_parallel_samples_are_elements_of_one_tensor(served: Served) -> None:
    responses = await served.stream(sampling={"max_tokens": 9, "n": 3}, return_num_output_tokens=True)
    assert all(len(values(response, "text_output")) == 3 for response in responses)
    assert [sum(values(response, "num_output_tokens")[i] for response in responses) for i in range(3)] == [9] * 3


async def test_parameters_of_the_request_may_be_text(served: Served) -> None:
    response = await served.model.infer(
        infer_request(
            exclude_input_in_output=True,
            return_num_output_tokens=True,
            parameters={"max_tokens": "5", "temperature": "0", "ignore_eos": "true"},
        )
    )
    assert values(response, "num_output_tokens") == [5]


async def test_outputs_that_are_named_come(served: Served) -> None:
    response = await served.model.infer(infer_request(outputs=("finish_reason",)))
    assert [tensor.name for tensor in response.outputs or []] == ["finish_reason"]
    assert values(response, "finish_reason") == ["length"]


@pytest.mark.parametrize(
    ("fields", "error", "told"),
    [
        ({"stream": True, "exclude_input_in_output": False}, InvalidRequestError, "exclude_input_in_output"),
        ({"sampling": {"max_tokens": 0}}, InvalidRequestError, "max_tokens"),
        ({"sampling": {"max_tokens": "many"}}, InvalidRequestError, "max_tokens"),
        ({"sampling": {"temperature": 9}}, InvalidRequestError, "temperature"),
        ({"sampling": {"n": 1000}}, InvalidRequestError, "n must be"),
        ({"sampling": "{"}, InvalidRequestError, "sampling_parameters"),
        ({"sampling": "[" * 300}, InvalidRequestError, "sampling_parameters"),
        ({"sampling": " " * (1 << 20) + "{}"}, InvalidRequestError, "longer than 1048576 bytes"),
        ({"sampling": {"guided_json": "{}"}}, UnsupportedError, "guided_json"),
        ({"sampling": {"lora_name": "x"}}, UnsupportedError, "LoRA feature is not enabled"),
        ({"sampling": {"priority": 3}}, UnsupportedError, "policy"),
        ({"parameters": {"best_of": 4}}, UnsupportedError, "best_of"),
        ({"text": b"\xff\xfe"}, InvalidRequestError, "UTF-8"),
        ({"sampling": {"logprobs": 1}}, UnsupportedError, "logprobs"),
    ],
)
async def test_what_cannot_be_is_refused(
    served: Served, fields: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        await served.model.infer(infer_request(**fields))
    statistics = served.model.statistics
    assert statistics.fail.count == statistics.failures["REJECTED"] == 1


async def test_lora_name_selects_one_of_the_model_s_adapters(served: Served, tmp_path: Path) -> None:
    adapters = [new_adapter(name, save_adapter(tmp_path / name)) for name in ("one", "two")]
    served.setup.take_adapters(AdapterSet(adapters))

    async def text(sampling: dict[str, Any]) -> str:
        request = infer_request(exclude_input_in_output=True, sampling={"max_tokens": 8} | sampling)
        return str(values(await served.model.infer(request), "text_output")[0])

    texts = [await text(sampling) for sampling in ({}, {"lora_name": "one"}, {"lora_name": "two"})]
    assert texts == [await served.expected(model=name) for name in ("m", "one", "two")]
    assert len(set(texts)) == 3
    with pytest.raises(InvalidRequestError, match=r"LoRA x is not supported, we currently support \['one', 'two'\]"):
        await text({"lora_name": "x"})
    stream = served.model.stream(infer_request(stream=True, sampling={"lora_name": "one"}))
    served.setup.model.adapters.remove(adapters[0])  # between reading the request and its first token
    [response] = [response async for response in stream]
    assert isinstance(response.error, InvalidRequestError)


async def test_a_key_for_some_models_chooses_no_other_adapter(served: Served, tmp_path: Path) -> None:
    adapters = [new_adapter(name, save_adapter(tmp_path / name)) for name in ("ours", "theirs")]
    served.setup.take_adapters(AdapterSet(adapters))

    def asked(adapter: str) -> InferRequest:
        caller = RequestContext(principal=Principal(tenant="t", models=("m", "ours")))
        return infer_request(sampling={"max_tokens": 1, "lora_name": adapter}, caller=caller, tenant="t")

    assert (await served.model.infer(asked("ours"))).error is None
    for stranger in ("theirs", "nobodys"):  # whether there is one they are not told
        with pytest.raises(PermissionDeniedError):
            await served.model.infer(asked(stranger))


async def test_an_answer_that_streams_has_no_single_response(served: Served) -> None:
    with pytest.raises(UnsupportedError):
        await served.model.infer(infer_request(stream=True))


async def test_wrong_tensors_are_refused_in_triton_s_words(served: Served) -> None:
    bad = InferRequest(inputs={"text_input": Tensor("text_input", "FP32", np.zeros(1, np.float32))})
    with pytest.raises(InvalidRequestError, match="data-type"):
        await served.model.infer(bad)
    with pytest.raises(InvalidRequestError, match="expected"):
        served.model.stream(InferRequest(inputs={}))


async def test_an_error_on_the_way_is_the_stream_s_end(served: Served) -> None:
    text = served.setup.tokenizer.decode([MARKER])
    responses = await served.stream(text=text)
    assert isinstance(responses[-1].error, NumericalError)
    assert responses[-1].final
    with pytest.raises(NumericalError):
        await served.model.infer(infer_request(text))
    assert served.model.statistics.failures["BACKEND"] == 2


async def test_leaving_a_stream_frees_its_blocks(served: Served) -> None:
    stream = served.model.stream(infer_request(stream=True, sampling={"max_tokens": 200}))
    await stream.__anext__()
    stream.close()
    stream.close()
    while served.setup.engine.stats.num_running:
        await asyncio.sleep(0)
    assert served.model.statistics.failures["CANCELED"] == 1
    assert served.setup.engine.stats.num_free_blocks == served.setup.engine.stats.num_blocks


async def test_cancelling_the_caller_cancels_the_request(served: Served) -> None:
    task = asyncio.create_task(served.model.infer(infer_request(sampling={"max_tokens": 200})))
    while not served.setup.engine.stats.num_running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while served.setup.engine.stats.num_running:
        await asyncio.sleep(0)
    assert served.model.statistics.failures["CANCELED"] == 1


async def test_statistics_count_every_end_once(served: Served) -> None:
    await served.model.infer(infer_request())
    await served.stream()
    with pytest.raises(InvalidRequestError):
        await served.model.infer(infer_request(sampling={"top_p": 7}))
    statistics = served.model.statistics
    assert (statistics.success.count, statistics.fail.count, statistics.execution_count) == (2, 1, 2)
    assert statistics.success.ns >= statistics.queue.ns + statistics.compute_infer.ns > 0


async def test_a_stopped_model_ends_what_it_has_accepted(served: Served) -> None:
    stream = served.model.stream(infer_request(stream=True, sampling={"max_tokens": 60}))
    await stream.__anext__()
    stopping = asyncio.create_task(served.model.stop())
    responses = [response async for response in stream]
    assert responses[-1].final
    assert responses[-1].error is None
    await stopping
    with pytest.raises(NotReadyError):
        await served.model.infer(infer_request())
    assert not served.model.ready
    assert served.setup.plane.models.served() == []
