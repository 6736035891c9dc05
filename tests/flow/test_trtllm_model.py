"""A language model with the tensors of NVIDIA's TensorRT-LLM backend, over the simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.contract.messages import Grammar
from penstock.engines.errors import CancelledError, InvalidRequestError, PenstockError, UnsupportedError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.generation import Generation
from penstock.gateway.models.language.kserve.language_model import LanguageModel, LanguageStream
from penstock.gateway.models.language.kserve.trtllm_form import TRTLLM_FORM
from penstock.gateway.models.language.models import ServedModel
from support.dataplane import Setup
from support.language_repository import context, write_trtllm

_TYPES = {bool: ("BOOL", np.bool_), int: ("INT32", np.int32), float: ("FP32", np.float32)}


def tensor(name: str, value: Any) -> Tensor:
    if name == "sampling_param_seed":
        return Tensor(name, "UINT64", np.array([value], np.uint64))
    if isinstance(value, str | list):
        values = [value] if isinstance(value, str) else value
        return Tensor(name, "BYTES", np.array([text.encode() for text in values], np.object_))
    datatype, dtype = _TYPES[type(value)]
    return Tensor(name, datatype, np.array([value], dtype))


def infer_request(inputs: dict[str, Any] | None = None, **fields: Any) -> InferRequest:
    """`inputs` by name; those of sampling without their prefix `sampling_param_`, as `p.max_tokens`."""
    given = {"text_input": "a question", **(inputs or {})}
    named = {name.replace("p.", "sampling_param_"): value for name, value in given.items()}
    return InferRequest(inputs={name: tensor(name, value) for name, value in named.items()}, **fields)


def values(response: InferResponse, name: str) -> list[Any]:
    [found] = [each for each in response.outputs or [] if each.name == name]
    return [item.decode() if isinstance(item, bytes) else item for item in found.array.tolist()]


class Served:
    def __init__(self, folder: Path) -> None:
        self.setup = Setup(folder / "weights", SchedulerConfig(), 64)
        config = context(write_trtllm(folder, "m", "weights")).config
        TRTLLM_FORM.complete(config)
        self.model = LanguageModel(
            self.setup.plane, self.setup.model, "m", policy="fcfs", config=config, form=TRTLLM_FORM
        )

    async def text(self, inputs: dict[str, Any]) -> str:
        response = await self.model.infer(infer_request({"p.exclude_input_from_output": True, **inputs}))
        return str(values(response, "text_output")[0])

    async def expected(self, max_tokens: int, **params: Any) -> str:
        deltas = await self.setup.generate(max_tokens=max_tokens, params={"temperature": 0.0, **params})
        return "".join(delta.text for delta in deltas)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    await served.setup.engine.start()
    served.setup.model.loaded = True
    yield served
    while served.setup.engine.stats.num_running:
        await asyncio.sleep(0)
    served.setup.engine.core.check_integrity()
    assert served.model.statistics.pending == 0
    assert served.model._by_id == {}
    await served.setup.engine.stop()


async def test_an_answer_stands_behind_its_prompt_unless_it_is_excluded(served: Served) -> None:
    expected = await served.expected(12)
    response = await served.model.infer(infer_request({"p.max_tokens": 12}))
    assert values(response, "text_output") == ["a question" + expected]
    assert await served.text({"p.max_tokens": 12}) == expected


async def test_32_greedy_tokens_without_a_word_about_it(served: Served) -> None:
    assert await served.text({}) == await served.expected(32)


async def test_streams_bring_the_text_so_far(served: Served) -> None:
    request = infer_request(
        {"streaming": True, "p.max_tokens": 20, "return_finish_reason": True, "return_stop_reason": True}
    )
    responses = [response async for response in served.model.stream(request)]
    texts = [values(response, "text_output")[0] for response in responses]
    assert len(texts) > 5
    assert texts[-1] == await served.expected(20)
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [values(response, "finish_reason")[0] for response in responses] == ["None"] * (len(texts) - 1) + ["length"]
    assert {values(response, "stop_reason")[0] for response in responses} == {"None"}


async def test_a_stop_string_is_named(served: Served) -> None:
    text = await served.expected(30)
    word = text[8:11]
    response = await served.model.infer(
        infer_request({"p.stop": ["never said", word], "p.max_tokens": 30}, outputs=("finish_reason", "stop_reason"))
    )
    assert (values(response, "finish_reason"), values(response, "stop_reason")) == (["stop"], [word])
    assert await served.text({"p.stop": [word], "p.max_tokens": 30}) == text[: text.index(word)]


async def test_sampling_reads_every_tensor(served: Served) -> None:
    read = TRTLLM_FORM.read(
        infer_request(
            {
                "p.temperature": 0.5,
                "p.top_k": 7,
                "p.top_p": 0.25,
                "p.frequency_penalty": 0.5,
                "p.presence_penalty": -0.5,
                "p.max_tokens": 9,
                "p.seed": 2**64 - 2,
                "p.best_of": 1,
                "p.return_perf_metrics": False,
            }
        ),
        served.setup.model.describe("m"),
        "fcfs",
    )
    params = read.generate.params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 0.25, 9)
    assert (params.frequency_penalty, params.presence_penalty, params.seed) == (0.5, -0.5, -2)


@pytest.mark.parametrize(
    ("inputs", "parameters"), [({"p.seed": 2**64 - 1}, {}), ({}, {"seed": "-1"}), ({}, {"seed": -1})]
)
async def test_a_seed_of_minus_one_is_none(
    served: Served, inputs: dict[str, Any], parameters: dict[str, int | str]
) -> None:
    read = TRTLLM_FORM.read(infer_request(inputs, parameters=parameters), served.setup.model.describe("m"), "fcfs")
    assert read.generate.params.seed is None


@pytest.mark.parametrize(
    ("inputs", "temperature"),
    [
        ({}, 0.0),
        ({"p.top_k": 1}, 0.0),
        ({"p.top_p": 0.0, "p.temperature": 0.8}, 0.0),
        ({"p.temperature": 0.0}, 0.0),
        ({"p.top_k": 5}, 1.0),
        ({"p.top_p": 0.5}, 1.0),
    ],
)
async def test_what_is_greedy_is_tensorrt_llm_s_rule(
    served: Served, inputs: dict[str, Any], temperature: float
) -> None:
    model = served.setup.model.describe("m")
    assert TRTLLM_FORM.read(infer_request(inputs), model, "fcfs").generate.params.temperature == temperature


async def test_parameters_without_the_prefix_count_where_the_tensors_are_silent(served: Served) -> None:
    request = infer_request({"p.exclude_input_from_output": True}, parameters={"max_tokens": 5, "temperature": "0"})
    assert values(await served.model.infer(request), "text_output") == [await served.expected(5)]
    both = infer_request({"p.exclude_input_from_output": True, "p.max_tokens": 4}, parameters={"max_tokens": 5})
    assert values(await served.model.infer(both), "text_output") == [await served.expected(4)]


def test_the_sample_s_tensors_are_kept() -> None:
    config = TRTLLM_FORM.config("m", "tensorrtllm")
    config.input.add(name="lora_path", data_type="TYPE_STRING", dims=[1], optional=True)
    TRTLLM_FORM.complete(config)
    assert [tensor.name for tensor in config.input][-1] == "lora_path"
    assert config.model_transaction_policy.decoupled


@pytest.mark.parametrize(
    ("inputs", "fields", "error", "told"),
    [
        ({"p.best_of": 2}, {}, UnsupportedError, "best_of must be 1"),
        ({"p.return_perf_metrics": True}, {}, UnsupportedError, "return_perf_metrics"),
        ({"lora_path": "/etc"}, {}, UnsupportedError, "'lora_path' is not supported: requests choose"),
        ({"lora_name": "x"}, {}, UnsupportedError, "LoRA feature is not enabled"),
        ({"image_url": ["http://x"]}, {}, UnsupportedError, "'image_url' is not supported"),
        ({}, {"outputs": ("kv_cache_hit_rate",)}, UnsupportedError, "'kv_cache_hit_rate' is not supported: responses"),
        ({}, {"parameters": {"beam_width": 2}}, UnsupportedError, "beam_width"),
        ({"return_cumulative_logprob": True}, {}, UnsupportedError, "logprobs"),
        ({"p.max_tokens": 0}, {}, InvalidRequestError, "max_tokens"),
        ({"p.temperature": float("nan")}, {}, InvalidRequestError, "temperature"),
        ({"p.stop": ["a"] * 1025}, {}, InvalidRequestError, "stop: at most"),
        ({"text_input": ["a", "b"]}, {}, InvalidRequestError, "Expected a scalar tensor for tensor text_input"),
        ({"stop": True}, {}, InvalidRequestError, "A request id must be provided for request cancellation"),
        ({"streaming": True}, {}, UnsupportedError, "many responses"),
    ],
)
async def test_what_cannot_be_is_refused(
    served: Served, inputs: dict[str, Any], fields: dict[str, Any], error: type[PenstockError], told: str
) -> None:
    with pytest.raises(error, match=told):
        await served.model.infer(infer_request(inputs, **fields))


async def stop(served: Served, **fields: Any) -> None:
    """What a request with `stop` is answered."""
    with pytest.raises(CancelledError, match="Request cancelled by client"):
        await served.model.infer(infer_request({"stop": True}, **fields))


async def rest(stream: LanguageStream) -> list[InferResponse]:
    return [response async for response in stream]


async def test_a_request_ends_those_of_its_id(served: Served) -> None:
    request = infer_request({"streaming": True, "p.max_tokens": 200}, id="7")
    streams = [served.model.stream(request) for _ in range(2)]
    other = served.model.stream(infer_request({"streaming": True, "p.max_tokens": 40}, id="8"))
    for stream in streams:
        await stream.__anext__()
    reading = [asyncio.create_task(rest(stream)) for stream in (*streams, other)]
    await stop(served, id="7")
    *ended, whole = await asyncio.gather(*reading)
    for responses in ended:
        assert isinstance(responses[-1].error, CancelledError)
        assert [response.error for response in responses[:-1]] == [None] * (len(responses) - 1)
    assert whole[-1].error is None
    assert served.model.statistics.failures["CANCELED"] == 3  # both, and the request that did it


async def test_a_request_that_still_waits_is_ended_too(served: Served) -> None:
    task = asyncio.create_task(served.model.infer(infer_request({"p.max_tokens": 200}, id="7")))
    while not served.model._by_id:
        await asyncio.sleep(0)
    await stop(served, id="7")
    with pytest.raises(CancelledError):
        await task


async def test_ids_of_other_tenants_are_not_touched(served: Served) -> None:
    stream = served.model.stream(infer_request({"streaming": True, "p.max_tokens": 30}, id="7", tenant="a"))
    await stop(served, id="7", tenant="b")
    assert (await rest(stream))[-1].error is None


async def test_cancelling_the_caller_is_no_cancellation_by_id(served: Served) -> None:
    task = asyncio.create_task(served.model.infer(infer_request({"p.max_tokens": 200}, id="7")))
    while not served.model._by_id:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert served.model.statistics.failures["CANCELED"] == 1


@pytest.mark.parametrize("how", ["its caller leaves", "another request ends it"])
async def test_a_request_that_ends_as_it_begins_gives_everything_back(
    served: Served, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Right after its first token, before the caller has received that."""
    generate_on = served.setup.plane.generate_on
    stream = served.model.stream(infer_request({"streaming": True, "p.max_tokens": 200}, id="7"))

    async def and_end(*args: Any, **options: Any) -> Generation:
        generation = await generate_on(*args, **options)
        asyncio.get_running_loop().call_soon(reading.cancel if how == "its caller leaves" else stream.cancel)
        return generation

    monkeypatch.setattr(served.setup.plane, "generate_on", and_end)
    reading = asyncio.create_task(rest(stream))
    await asyncio.wait((reading,))
    stream.close()
    assert served.setup.model.in_flight.calls == 0
    assert reading.cancelled() or [type(each.error) for each in reading.result()] == [CancelledError]


GUIDES = [
    ({"guided_decoding_guide_type": "json"}, Grammar("json_schema", "{}")),
    (
        {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"type": "null"}'},
        Grammar("json_schema", '{"type":"null"}'),
    ),
    ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}, Grammar("regex", "a+")),
    (
        {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": 'root ::= "a"'},
        Grammar("grammar", 'root ::= "a"'),
    ),
]


def described(served: Served, *, grammars: bool = True) -> ServedModel:
    model = served.setup.model.describe("m")
    return replace(model, info=msgspec.structs.replace(model.info, supports_grammars=grammars))


@pytest.mark.parametrize(("given", "grammar"), GUIDES)
async def test_guides_become_grammars_from_tensors_and_parameters_alike(
    served: Served, given: dict[str, Any], grammar: Grammar
) -> None:
    model = described(served)
    for request in (infer_request(given), infer_request(parameters=given)):
        assert TRTLLM_FORM.read(request, model, "fcfs").generate.params.grammar == grammar
    with pytest.raises(UnsupportedError):
        TRTLLM_FORM.read(infer_request(given), described(served, grammars=False), "fcfs")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_decoding_guide_type": "xml"}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide": "a+"}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide"),
        (
            {"guided_decoding_guide_type": "json", "structured_outputs": '{"regex": "a"}'},
            "guided_decoding_guide_type",
        ),
        ({"guided_decoding_guide_type": "json", "guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_guides_that_are_wrong_are_named(served: Served, given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TRTLLM_FORM.read(infer_request(parameters=given), described(served), "fcfs")
    assert caught.value.param == param
