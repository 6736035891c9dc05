"""The identity backend, as a model and as a model that misbehaves."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from penstock.classic.identity import IdentityBackend
from penstock.engines.errors import EngineError
from support.classic import echo_request, load, model_config, output, request

TWO = """
    name: "two" backend: "identity" max_batch_size: 8 dynamic_batching {}
    input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
    input { name: "INPUT1" data_type: TYPE_STRING dims: [ -1 ] optional: true }
    output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUTPUT1" data_type: TYPE_STRING dims: [ -1 ] }
"""
TEXT = """
    name: "text" backend: "identity"
    input { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] }
    output { name: "OUTPUT0" data_type: TYPE_STRING dims: [ -1 ] }
"""


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'


async def test_outputs_are_the_inputs_of_their_number() -> None:
    model = await load(model_config(TWO), IdentityBackend({}))
    texts = [np.array([[b"a", b""]], object), np.array([[b"b"]], object)]
    both = await asyncio.gather(*(model.infer(request(INPUT0=[[n]], INPUT1=texts[n])) for n in range(2)))
    assert [output(response).tolist() for response in both] == [[[0]], [[1]]]
    assert [output(response, "OUTPUT1").tolist() for response in both] == [[[b"a", b""]], [[b"b"]]]
    # Texts of different lengths are not batched.
    assert model.statistics.execution_count == 2
    alone = await model.infer(request(INPUT0=[[3]], outputs=("OUTPUT0",)))
    assert output(alone).tolist() == [[3]]
    await model.stop()


async def test_decoupled_it_answers_once() -> None:
    config = model_config(TWO, "model_transaction_policy { decoupled: true }")
    model = await load(config, IdentityBackend({}))
    [response] = [response async for response in model.stream(echo_request(4))]
    assert output(response).tolist() == [[4]]
    await model.stop()


async def test_it_can_fail_on_a_value_and_take_its_time() -> None:
    config = model_config(TWO, parameter("fail_on", "13"), parameter("execute_delay_ms", "20"))
    model = await load(config, IdentityBackend({}))
    started = time.monotonic()
    results = await asyncio.gather(*(model.infer(echo_request(n)) for n in (12, 13, 14)), return_exceptions=True)
    assert time.monotonic() - started >= 0.02
    assert [type(result).__name__ for result in results] == ["InferResponse", "EngineError", "InferResponse"]
    await model.stop()

    model = await load(model_config(TEXT, parameter("fail_on", "boom")), IdentityBackend({}))
    with pytest.raises(EngineError, match="'boom'"):
        await model.infer(request(INPUT0=np.array([b"x", b"boom"], object)))
    assert output(await model.infer(request(INPUT0=np.array([b"boo"], object)))).tolist() == [b"boo"]
    await model.stop()


async def test_it_does_not_change_its_configuration() -> None:
    config = model_config(TEXT)
    before = config.SerializeToString()
    model = await load(config, IdentityBackend({}))
    assert model.config.SerializeToString() == before
    await model.stop()


@pytest.mark.parametrize(
    "text",
    [
        'name: "m" output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }',
        """name: "m" input { name: "INPUT0" data_type: TYPE_INT64 dims: [ 1 ] }
        output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }""",
        TEXT + parameter("execute_delay_ms", "soon"),
    ],
)
async def test_configurations_that_make_no_identity_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        await load(model_config(text), IdentityBackend({}))
