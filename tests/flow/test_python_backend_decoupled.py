"""Response senders: decoupled models, and the one response of others; cancellation."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.classic.batching import responses as streams
from penstock.classic.batching.responses import CallStream
from penstock.classic.loading import ClassicModel
from penstock.classic.messages import InferResponse
from penstock.engines.errors import EngineError
from support.classic import check_books, until
from support.python_backend import CPU, loaded, outputs, request

CONFIG = f"""
max_batch_size: 0
input [ {{ name: "N" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }} ]
model_transaction_policy {{ decoupled: true }}
{CPU}
"""
ONE = CONFIG.replace("model_transaction_policy { decoupled: true }", "")
FINAL = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
HELPERS = """
import threading
def y(number):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([number], np.int32))])
def n(request):
    return int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
"""


def n(number: int) -> np.ndarray:
    return np.array([number], np.int32)


async def streamed(model: ClassicModel, number: int) -> list[InferResponse]:
    return [response async for response in model.stream(request(N=n(number)))]


def values(responses: list[InferResponse]) -> list[Any]:
    return [outputs(one)["Y"].tolist()[0] if one.outputs else None for one in responses]


def model_of(body: str) -> str:
    """`execute` with this body for each request `r` and its sender `s`."""
    lines = "\n".join(f"            {line}" for line in body.strip().splitlines())
    return f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            s = r.get_response_sender()
{lines}
"""


async def test_responses_during_execute(tmp_path: Path) -> None:
    code = model_of(f"for i in range(n(r)): s.send(y(i))\ns.send({FINAL})")
    async with loaded(tmp_path, code, CONFIG) as model:
        found = await streamed(model, 3)
        assert values(found) == [0, 1, 2, None]
        assert [one.final for one in found] == [False, False, False, True]
        assert values(await streamed(model, 0)) == [None]


async def test_the_last_response_can_be_the_final_one(tmp_path: Path) -> None:
    async with loaded(tmp_path, model_of(f"s.send(y(7), {FINAL})"), CONFIG) as model:
        found = await streamed(model, 3)
    assert values(found) == [7]
    assert found[0].final


async def test_responses_from_threads_after_execute(tmp_path: Path) -> None:
    """The instance takes the next request while the first one is being answered."""
    code = f"""{HELPERS}
class TritonPythonModel:
    def initialize(self, args):
        self.waiting = []
    def execute(self, requests):
        self.waiting += [r.get_response_sender() for r in requests]
        if len(self.waiting) == 4:
            def answer():
                for index, sender in enumerate(self.waiting):
                    sender.send(y(index))
                    sender.send({FINAL})
                self.waiting.clear()
            threading.Thread(target=answer).start()
"""
    async with loaded(tmp_path, code, CONFIG) as model:
        found = await asyncio.wait_for(asyncio.gather(*(streamed(model, 0) for _ in range(4))), 20)
    assert [values(one) for one in found] == [[0, None], [1, None], [2, None], [3, None]]


async def test_coroutines_go_on_in_the_background(tmp_path: Path) -> None:
    code = f"""{HELPERS}
import asyncio
class TritonPythonModel:
    waiting = 0
    async def execute(self, requests):
        type(self).waiting += 1
        while self.waiting < 3:
            await asyncio.sleep(0.001)
        for r in requests:
            r.get_response_sender().send(y(self.waiting), {FINAL})
"""
    async with loaded(tmp_path, code, CONFIG) as model:
        found = await asyncio.wait_for(asyncio.gather(*(streamed(model, 0) for _ in range(3))), 20)
    assert [values(one) for one in found] == [[3]] * 3


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_an_exception_ends_the_stream(tmp_path: Path, prefix: str) -> None:
    code = f"""{HELPERS}
class TritonPythonModel:
    {prefix}def execute(self, requests):
        for r in requests:
            r.get_response_sender().send(y(1))
        raise ValueError("enough")
"""
    async with loaded(tmp_path, code, CONFIG) as model:
        found = await streamed(model, 0)
    assert values(found) == [1, None]
    assert isinstance(found[1].error, EngineError)
    assert found[1].error.message == "Failed to process the request(s) for model 'm_0_0', message: ValueError: enough"


async def test_errors_within_a_stream(tmp_path: Path) -> None:
    code = model_of(f"s.send(pb_utils.InferenceResponse(error=pb_utils.TritonError('why')))\ns.send(y(2), {FINAL})")
    async with loaded(tmp_path, code, CONFIG) as model:
        found = await streamed(model, 0)
    assert found[0].error is not None
    assert not found[0].final
    assert values(found) == [None, 2]


async def test_a_returned_list_is_refused(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def execute(self, requests): return []\n"
    async with loaded(tmp_path, code, CONFIG) as model:
        [found] = await streamed(model, 0)
    assert found.error is not None
    assert "is using the decoupled mode and the execute function must return None." in found.error.message


@pytest.mark.parametrize("body", ["pass", "s.send(y(1))"])
async def test_a_request_that_is_let_go_ends_with_an_error(tmp_path: Path, body: str) -> None:
    async with loaded(tmp_path, model_of(body), CONFIG) as model:
        found = await asyncio.wait_for(streamed(model, 0), 20)
    assert found[-1].error is not None
    assert "without a final response" in found[-1].error.message


async def test_what_a_sender_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    body = f"""
for arguments in [dict(flags=2), dict(), dict(response="x")]:
    try: s.send(**arguments)
    except Exception as error: print("refused:", error)
s.send({FINAL})
try: s.send(y(1))
except pb_utils.TritonModelException as error: print("refused:", error)
"""
    async with loaded(tmp_path, model_of(body), CONFIG) as model:
        await streamed(model, 0)
    for text in (
        "Unable to send response. Unsupported flag provided.",
        "Inference Response object must be provided when the response flags is set to zero.",
        "response must be InferenceResponse, not str",
        "Unable to send response. Response sender has been closed.",
    ):
        assert f"refused: {text}" in caplog.text


# The senders of models that are not decoupled.


async def test_one_response_through_a_sender(tmp_path: Path) -> None:
    code = f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            r.get_response_sender().send(y(5), {FINAL})
        return [None] * len(requests)
"""
    async with loaded(tmp_path, code, ONE) as model:
        assert values([await model.infer(request(N=n(0)))]) == [5]


async def test_one_response_from_a_thread(tmp_path: Path) -> None:
    code = f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            def answer():
                sender.send(y(6))
                sender.send({FINAL})
            threading.Timer(0.05, answer).start()
        return None
"""
    async with loaded(tmp_path, code, ONE) as model:
        assert values([await model.infer(request(N=n(0)))]) == [6]


async def test_what_a_sender_refuses_of_other_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    code = f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        [r] = requests
        s = r.get_response_sender()
        try: s.send({FINAL})
        except Exception as error: print("refused:", error)
        s.send(y(1))
        try: s.send(y(2))
        except Exception as error: print("refused:", error)
        if n(r): return [y(3)]
"""
    async with loaded(tmp_path, code, ONE) as model:
        assert values([await model.infer(request(N=n(0)))]) == [1]
        assert values([await model.infer(request(N=n(1)))]) == [1]
    only = "Unable to send response. Non-decoupled model cannot send"
    assert f"refused: {only} complete final before sending a response." in caplog.text
    assert f"refused: {only} more than one response." in caplog.text


async def test_a_sender_that_is_let_go_without_a_response(tmp_path: Path) -> None:
    code = f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        [r] = requests
        r.get_response_sender()
        return [None]
"""
    async with loaded(tmp_path, code, ONE) as model:
        with pytest.raises(EngineError, match="without a final response"):
            await asyncio.wait_for(model.infer(request(N=n(0))), 20)


async def test_cancellation_reaches_the_model(tmp_path: Path) -> None:
    code = f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            s = r.get_response_sender()
            def answer(r=r, s=s):
                s.send(y(int(r.is_cancelled())))
                while not s.is_cancelled(): pass
                open({str(tmp_path / "seen")!r}, "w").write(str(r.is_cancelled()))
                s.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("c", pb_utils.TritonError.CANCELLED)),
                       {FINAL})
            threading.Thread(target=answer).start()
"""
    async with loaded(tmp_path, code, CONFIG) as model:
        stream = model.stream(request(N=n(0)))
        assert values([await anext(aiter(stream))]) == [0]
        stream.close()
        for _ in range(2000):
            if (tmp_path / "seen").exists() and (tmp_path / "seen").read_text():
                break
            await asyncio.sleep(0.01)
    assert (tmp_path / "seen").read_text() == "True"


BATCHED = CONFIG.replace("max_batch_size: 0", "max_batch_size: 3") + (
    "dynamic_batching { max_queue_delay_microseconds: 30000000 }"
)
"""Three requests are a batch; a test never waits for the delay."""
IN_TURN = f"""{HELPERS}
import time
class TritonPythonModel:
    def execute(self, requests):
        senders = [[r.get_response_sender(), int(pb_utils.get_input_tensor_by_name(r, "N").as_numpy()[0, 0])]
                   for r in requests]
        def answer():
            number = len(senders)
            while senders:
                for pair in list(senders):
                    sender, left = pair
                    if left == 0 or sender.is_cancelled():
                        sender.send({FINAL})
                        senders.remove(pair)
                    else:
                        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[number]], np.int32))]))
                        pair[1] -= 1
                time.sleep(0.001)
        threading.Thread(target=answer).start()
"""
"""Each request is answered so often with the size of its batch, all in turn."""


async def test_requests_of_one_execution_have_streams_of_their_own(tmp_path: Path) -> None:
    async with loaded(tmp_path, IN_TURN, BATCHED) as model:
        streams = [model.stream(request(N=n(number)[None])) for number in (2, 0, 5)]
        found = [[one async for one in stream] for stream in streams]
        assert [[row and row[0] for row in values(one)] for one in found] == [[3, 3, None], [None], [3] * 5 + [None]]
        assert all([one.final for one in stream] == [False] * (len(stream) - 1) + [True] for stream in found)
        check_books(model, 3)
        assert (model.statistics.execution_count, model.statistics.inference_count) == (1, 3)


async def test_a_cancelled_request_leaves_the_streams_of_its_batch(tmp_path: Path) -> None:
    async with loaded(tmp_path, IN_TURN, BATCHED) as model:
        endless, *others = [model.stream(request(N=n(number)[None])) for number in (-1, 20, 30)]
        await anext(aiter(endless))
        endless.close()
        found = [[one async for one in stream] for stream in others]
        assert [len(one) for one in found] == [21, 31]
        assert all(one[-1].final and one[-1].error is None for one in found)
        check_books(model, 3)
        assert model.statistics.failures == {"CANCELED": 1}


async def test_what_fails_in_a_batch_of_streams_ends_those_that_have_begun(tmp_path: Path) -> None:
    """The others are tried again, one by one."""
    code = f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        numbers = [int(pb_utils.get_input_tensor_by_name(r, "N").as_numpy()[0, 0]) for r in requests]
        for r, number in zip(requests, numbers):
            if number == 13 and len(requests) > 1:
                raise ValueError("thirteen")
            r.get_response_sender().send(
                pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[number]], np.int32))]))
            if len(requests) == 1:
                r.get_response_sender().send({FINAL})
"""
    async with loaded(tmp_path, code, BATCHED) as model:
        streams = [model.stream(request(N=n(number)[None])) for number in (1, 13, 2)]
        begun, *others = [[one async for one in stream] for stream in streams]
        assert begun[-1].error is not None
        assert "ValueError: thirteen" in begun[-1].error.message
        assert [values(one) for one in others] == [[[13], None], [[2], None]]
        check_books(model, 3)


@pytest.mark.parametrize("coroutine", [False, True])
async def test_a_paced_reader_slows_the_model_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coroutine: bool
) -> None:
    monkeypatch.setattr(streams, "MAX_UNREAD_RESPONSES", 3000)
    code = model_of(f"""
for i in range(n(r)): s.send(y(i))
s.send({FINAL})
""")
    async with loaded(
        tmp_path, code.replace("def execute", "async def execute" if coroutine else "def execute"), CONFIG
    ) as model:
        stream = model.stream(request(N=n(9000)))
        assert isinstance(stream, CallStream)
        stream.pace()
        await until(lambda: stream._room is not None)
        found = values([response async for response in stream])
        assert found == [*range(9000), None]
        given_up = model.stream(request(N=n(9000)))
        assert isinstance(given_up, CallStream)
        given_up.pace()
        await until(lambda: given_up._room is not None)
        given_up.close()
        assert values(await streamed(model, 1)) == [0, None]
