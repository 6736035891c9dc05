"""Ensembles: steps in order and at the same time, what is passed down, errors, cancellation, the books."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import Batch
from penstock.classic.ensemble.model import EnsembleModel
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, NotReadyError, UnsupportedError
from support.classic import Execute, output, request, until
from support.ensembles import DECOUPLED, X_TO_Y, add, config_of, count_up, ensemble_of, shelf_with, step, x_to_y

TWO_OUTPUTS = X_TO_Y + 'output { name: "Z" data_type: TYPE_INT32 dims: [ 1 ] }'
SUM = """
    input [ { name: "A" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "B" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
    output { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] }
"""  # noqa: E501


def add_up(batch: Batch) -> None:
    inputs = batch.gather()
    batch.scatter({"Y": inputs["A"] + inputs.get("B", np.int32(100))})


async def asked(model: EnsembleModel, value: int, **more: Any) -> dict[str, Any]:
    response = await model.infer(request(X=[[value]], **more))
    return {tensor.name: tensor.array.tolist() for tensor in response.outputs or ()}


async def streamed(model: EnsembleModel, value: int) -> list[Any]:
    """The values of the responses; errors as they are, an end without outputs as None. The last one is the end."""
    with closing(model.stream(request(X=[[value]]))) as stream:
        found = [response async for response in stream]
    assert [response.final for response in found] == [*(False for _ in found[1:]), True]
    return [_shown(response) for response in found]


def _shown(response: InferResponse) -> Any:
    return response.error or (None if response.outputs is None else int(output(response, "Y")[0, 0]))


async def test_steps_one_after_the_other() -> None:
    async with shelf_with(one=add(1), ten=add(10)) as shelf:
        model = ensemble_of(shelf, x_to_y("ten", "t", "Y"), x_to_y("one", "X", "t"))
        response = await model.infer(request(X=[[1], [2]], id="i"))
        assert output(response, "Y").tolist() == [[12], [13]]
        assert response.parameters == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
        assert not model.config.model_transaction_policy.decoupled
        assert [r.outputs is not None and r.final async for r in model.stream(request(X=[[1]]))] == [True]


async def test_steps_that_need_nothing_of_each_other_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2)

    def meet(batch: Batch) -> None:
        meeting.wait(30)
        add(1)(batch)

    sums = (add_up, config_of("both", SUM))
    async with shelf_with(left=meet, right=meet, both=sums) as shelf:
        model = ensemble_of(
            shelf, x_to_y("left", "X", "a"), x_to_y("right", "X", "b"), step("both", {"A": "a", "B": "b"}, {"Y": "Y"})
        )
        assert await asked(model, 1) == {"Y": [[4]]}


async def test_an_input_may_be_an_output() -> None:
    """As in Triton; the step does not run where nothing else is asked for."""
    ran = []

    def count(batch: Batch) -> None:
        ran.append(len(batch.calls))
        add(1)(batch)

    passed = X_TO_Y + 'output { name: "X" data_type: TYPE_INT32 dims: [ -1 ] }'
    async with shelf_with(one=count) as shelf:
        model = ensemble_of(shelf, x_to_y("one", "X", "Y"), tensors=passed)
        assert await asked(model, 1) == {"Y": [[2]], "X": [[1]]}
        assert await asked(model, 3, outputs=("X",)) == {"X": [[3]]}
        assert ran == [1]
        with closing(model.stream(request(X=[[5]]))) as stream:
            [response] = [each async for each in stream]
        assert output(response, "X").tolist() == [[5]]
        assert model.source("X") is None


@pytest.mark.parametrize(
    ("described", "told"),
    [
        ("TYPE_FP32 dims: [ 1 ]", "data type: TYPE_INT32 .* TYPE_FP32"),
        ("TYPE_INT32 dims: [ 2 ]", r"\[-1,1\] .*\[-1,2\]"),
    ],
)
async def test_an_input_is_the_same_tensor_as_an_output(described: str, told: str) -> None:
    passed = X_TO_Y + f'output {{ name: "X" data_type: {described} }}'
    async with shelf_with(one=add(1)) as shelf:
        with pytest.raises(InvalidRequestError, match=f"ensemble tensor X: inconsistent .*{told}"):
            ensemble_of(shelf, x_to_y("one", "X", "Y"), tensors=passed)


async def test_an_input_does_not_come_with_each_response() -> None:
    passed = X_TO_Y + 'output { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }'
    async with shelf_with(many=(count_up, config_of("many", X_TO_Y, DECOUPLED))) as shelf:
        with pytest.raises(InvalidRequestError, match="the outputs originate from different decoupled models"):
            ensemble_of(shelf, x_to_y("many", "X", "Y"), tensors=passed)


async def test_tensors_are_handed_on_without_copies() -> None:
    seen: list[Any] = []

    def keep(batch: Batch) -> None:
        seen.append(batch.gather()["X"])
        batch.scatter({"Y": seen[-1]})

    async with shelf_with(a=keep, b=keep) as shelf:
        model = ensemble_of(shelf, x_to_y("a", "X", "t"), x_to_y("b", "t", "Y"))
        response = await model.infer(made := request(X=[[1]]))
        assert np.shares_memory(seen[0], made.inputs["X"].array)
        assert np.shares_memory(seen[0], seen[1])
        assert np.shares_memory(seen[0], output(response, "Y"))


async def test_only_the_requested_outputs_are_computed() -> None:
    async with shelf_with(one=add(1), ten=add(10)) as shelf:
        model = ensemble_of(shelf, x_to_y("one", "X", "Y"), x_to_y("ten", "Y", "Z"), tensors=TWO_OUTPUTS)
        assert await asked(model, 1, outputs=("Y",)) == {"Y": [[2]]}
        assert shelf.models["ten"].statistics.execution_count == 0
        assert list(await asked(model, 1, outputs=("Z", "Y"))) == ["Z", "Y"]
        with pytest.raises(InvalidRequestError, match="unexpected inference output 'N' for model 'e'"):
            await asked(model, 1, outputs=("N",))


async def test_an_optional_input_that_is_left_out_is_left_out_for_the_step() -> None:
    async with shelf_with(both=(add_up, config_of("both", SUM))) as shelf:
        model = ensemble_of(shelf, step("both", {"A": "A", "B": "B"}, {"Y": "Y"}), tensors=SUM)
        assert output(await model.infer(request(A=[[1]], B=[[2]])), "Y").tolist() == [[3]]
        assert output(await model.infer(request(A=[[1]])), "Y").tolist() == [[101]]


async def test_models_with_and_without_batches() -> None:
    """As in Triton, a batch of one is added or taken away."""
    single = config_of("single", X_TO_Y, max_batch_size=0)
    async with shelf_with(one=add(1), single=(add(5), single)) as shelf:
        model = ensemble_of(shelf, x_to_y("one", "X", "t"), x_to_y("single", "t", "u"), x_to_y("one", "u", "Y"))
        assert await asked(model, 1) == {"Y": [[8]]}
        with pytest.raises(InvalidRequestError, match=r"in ensemble 'e', .*unexpected shape for input 'X' .* 'single'"):
            await model.infer(request(X=[[1], [2]]))


async def test_what_the_caller_says_is_passed_down() -> None:
    seen: list[Any] = []

    def look(batch: Batch) -> None:
        seen.extend(call.request for call in batch.calls)
        add(0)(batch)

    async with shelf_with(a=look) as shelf:
        model = ensemble_of(shelf, x_to_y("a", "X", "t"), x_to_y("a", "t", "Y"))
        made = request(X=[[1]], id="i")
        made.priority, made.timeout_us, made.deadline, made.tenant = 2, 5_000_000, 1e12, "t"
        made.correlation_id, made.sequence_start, made.parameters = "s", True, {"k": 1}
        response = await model.infer(made)
        assert response.parameters == {"sequence_id": "s", "sequence_start": True, "sequence_end": False}
        for one in seen:
            names = ("id", "priority", "timeout_us", "deadline", "tenant", "correlation_id", "parameters")
            assert [getattr(one, n) for n in names] == [getattr(made, n) for n in names]
            assert one.sequence_start
            assert not one.sequence_end


def sends(number: int, **told: Any) -> Execute:
    """Adds the number, and says more with the response."""

    def execute(batch: Batch) -> None:
        for call in batch.calls:
            array = call.request.inputs["X"].array + np.int32(number)
            call.send(InferResponse([Tensor("Y", "INT32", array)], told))

    return execute


async def test_a_step_s_response_may_name_the_sequence_of_those_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    """As in Triton. What it does not say stays as it was, and where two disagree, the first holds."""
    seen: list[InferRequest] = []

    def look(batch: Batch) -> None:
        seen.extend(call.request for call in batch.calls)
        add_up(batch)

    two = config_of("look", SUM)
    new, old = sends(1, sequence_id="new", sequence_end=True), sends(2, sequence_id=5)
    async with shelf_with(new=new, old=old, look=(look, two), bad=sends(1, sequence_id=True)) as shelf:
        both = step("look", {"A": "t", "B": "u"}, {"Y": "Y"})
        model = ensemble_of(shelf, x_to_y("new", "X", "t"), x_to_y("old", "X", "u"), both)
        asked_for = request(X=[[1]])
        asked_for.correlation_id, asked_for.sequence_start = 3, True
        response = await model.infer(asked_for)
        [given] = seen
        assert (given.correlation_id, given.sequence_start, given.sequence_end) == ("new", True, True)
        assert "different sequences" in caplog.text
        assert response.parameters == {"sequence_id": 3, "sequence_start": True, "sequence_end": False}
        last = ensemble_of(shelf, x_to_y("new", "X", "Y"), name="last")
        told = {"sequence_id": "new", "sequence_start": False, "sequence_end": True}
        assert (await last.infer(request(X=[[1]]))).parameters == told
        wrong = ensemble_of(shelf, x_to_y("bad", "X", "Y"), name="f")
        with pytest.raises(EngineError, match="model 'bad' gives an invalid sequence for its response"):
            await wrong.infer(request(X=[[1]]))


def refuse(batch: Batch) -> None:
    raise EngineError("broken")


async def test_the_error_of_a_step_ends_the_request_once_and_the_other_steps() -> None:
    waiting, cancelled = threading.Event(), threading.Event()

    def wait(batch: Batch) -> None:
        waiting.set()
        while not batch.calls[0].cancelled:
            if cancelled.wait(0.001):
                return
        cancelled.set()

    def refuse_later(batch: Batch) -> None:
        waiting.wait(30)
        raise EngineError("broken")

    async with shelf_with(wait=wait, bad=refuse_later) as shelf:
        model = ensemble_of(shelf, x_to_y("wait", "X", "Y"), x_to_y("bad", "X", "Z"), tensors=TWO_OUTPUTS)
        with pytest.raises(EngineError, match=r"^in ensemble 'e', broken$"):
            await asked(model, 1)
        await until(cancelled.is_set)
        assert shelf.models["wait"].statistics.failures == {"CANCELED": 1}
        assert model.statistics.failures == {"OTHER": 1}
        waiting.clear()
        cancelled.clear()
        [error] = await streamed(model, 1)
        assert error.message == "in ensemble 'e', broken"


async def test_cancelling_reaches_the_step_that_runs() -> None:
    running, seen = threading.Event(), threading.Event()

    def wait(batch: Batch) -> None:
        running.set()
        while not batch.calls[0].cancelled and not seen.wait(0.001):
            pass
        seen.set()

    async with shelf_with(one=add(1), wait=wait) as shelf:
        model = ensemble_of(shelf, x_to_y("one", "X", "t"), x_to_y("wait", "t", "Y"))
        for ask in (lambda: asyncio.ensure_future(asked(model, 1)), lambda: asyncio.ensure_future(streamed(model, 1))):
            running.clear()
            seen.clear()
            task: asyncio.Future[Any] = ask()
            await until(running.is_set)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            stream = model.stream(request(X=[[1]]))
            stream.close()
            await until(seen.is_set)
        await until(lambda: model.statistics.fail.count == 4)
        assert model.statistics.failures == {"CANCELED": 4}
        await asyncio.wait_for(model.stop(), 10)


async def test_the_books_of_an_ensemble_and_of_its_models() -> None:
    async with shelf_with(one=add(1), ten=add(10)) as shelf:
        inner = ensemble_of(shelf, x_to_y("ten", "X", "t"), x_to_y("ten", "t", "Y"), name="inner")
        model = ensemble_of(shelf, x_to_y("one", "X", "t"), x_to_y("inner", "t", "Y"))
        response = await model.infer(request(X=[[1], [2], [3]]))
        assert output(response, "Y").tolist() == [[22], [23], [24]]
        for found, requests in ((model, 1), (inner, 1), (shelf.models["one"], 1), (shelf.models["ten"], 2)):
            counts = found.statistics
            assert (counts.success.count, counts.execution_count) == (requests, requests)
            assert (counts.inference_count, list(counts.batches)) == (3 * requests, [3])
        spent = [shelf.models[name].statistics.compute_infer.ns for name in ("one", "ten")]
        assert model.statistics.compute_infer.ns == sum(spent)
        assert inner.statistics.compute_infer.ns == spent[1]
        with pytest.raises(InvalidRequestError, match=r"^\[request id: <id_unknown>\] unexpected shape"):
            await model.infer(request(X=[[1, 2]]))
        assert model.statistics.fail.count == 0


async def test_a_model_that_is_not_there_any_more() -> None:
    async with shelf_with(one=add(1)) as shelf:
        model = ensemble_of(shelf, x_to_y("one", "X", "Y"))
        assert model.ready
        lost = shelf.models.pop("one")
        assert not model.ready
        with pytest.raises(InvalidRequestError, match="in ensemble 'e', Request for unknown model: 'one'"):
            await asked(model, 1)
        shelf.models["one"] = lost
        await model.stop()
        with pytest.raises(NotReadyError):
            await asked(model, 1)


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        (X_TO_Y.replace("X", "W"), "ensemble tensor X is mapping to non-existing input X in model m"),
        (X_TO_Y.replace('"Y"', '"W"'), "ensemble tensor Y is mapped from non-existing output Y in model m"),
        (
            X_TO_Y + 'input { name: "W" data_type: TYPE_INT32 dims: [ 1 ] }',
            "in ensemble e, input W in model m is not mapped to any ensemble tensors",
        ),
        (
            X_TO_Y.replace("INT32", "FP32", 1),
            "ensemble tensor X: inconsistent data type: TYPE_INT32 is inferred from model e while TYPE_FP32 is",
        ),
        (
            X_TO_Y.replace("[ 1 ]", "[ 2 ]", 1),
            r"tensor X: inconsistent shape: \[-1,1\] is inferred from model e while \[-1,2\] is inferred from model m",
        ),
    ],
)
async def test_models_that_do_not_fit(inner: str, told: str) -> None:
    async with shelf_with(m=(add(1), config_of("m", inner))) as shelf:
        with pytest.raises(InvalidRequestError, match=told):
            ensemble_of(shelf, x_to_y("m", "X", "Y"))


async def test_batches_that_a_model_cannot_take_and_versions_that_are_not_there() -> None:
    async with shelf_with(m=add(1)) as shelf:
        with pytest.raises(InvalidRequestError, match="allows maximum batch size 9, but it contains model m which"):
            ensemble_of(shelf, x_to_y("m", "X", "Y"), more="max_batch_size: 9")
        with pytest.raises(InvalidRequestError, match="depends on 'm' whose required version 7 is not loaded"):
            ensemble_of(shelf, x_to_y("m", "X", "Y").replace("-1", "7"))
        with pytest.raises(InvalidRequestError, match="depends on 'n' which has no loaded version"):
            ensemble_of(shelf, x_to_y("n", "X", "Y"))


COUNT = config_of("count", X_TO_Y, DECOUPLED)
COUNT_UP = (count_up, COUNT)


class Counting:
    """A decoupled step, and steps that wait for its end."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def count(self, batch: Batch) -> None:
        count_up(batch)
        self.ended.set()

    def later(self, number: int) -> Execute:
        def execute(batch: Batch) -> None:
            self.ended.wait(30)
            add(number)(batch)

        return execute


async def test_each_response_of_a_decoupled_step_goes_through_the_later_ones() -> None:
    counting = Counting()
    async with shelf_with(count=(counting.count, COUNT), ten=add(10), later=counting.later(10)) as shelf:
        model = ensemble_of(shelf, x_to_y("ten", "X", "t"), x_to_y("count", "t", "u"), x_to_y("later", "u", "Y"))
        assert model.config.model_transaction_policy.decoupled
        assert await streamed(model, -6) == [10, 11, 12, 13]
        assert await streamed(model, -10) == [None]
        assert model.statistics.success.count == 2
        assert not model.takes_infer
        with pytest.raises(UnsupportedError, match="decoupled"):
            await asked(model, 1)


async def test_responses_keep_the_order_of_the_step_that_they_come_from() -> None:
    """Also when the later steps end in another one; and no more of them are on their way than the limit says."""
    open_gate, most, counting = threading.Event(), [0], Counting()

    def first_last(batch: Batch) -> None:
        value = int(batch.gather()["X"][0, 0])
        most[0] = max(most[0], value)
        if value == 0:
            open_gate.wait(30)
        add(0)(batch)

    slow = config_of("slow", X_TO_Y, "instance_group { count: 4 kind: KIND_CPU }")
    async with shelf_with(count=(counting.count, COUNT), slow=(first_last, slow)) as shelf:
        steps = (x_to_y("count", "X", "t"), x_to_y("slow", "t", "Y"), "max_inflight_requests: 3")
        reading = asyncio.create_task(streamed(ensemble_of(shelf, *steps), 40))
        await until(lambda: most[0] == 2 and counting.ended.is_set())
        open_gate.set()
        assert await reading == [*range(40)]


@pytest.mark.parametrize("width", [1, 2, 64])
async def test_the_last_response_is_the_end_where_the_decoupled_step_has_ended_by_then(width: int) -> None:
    """As in Triton: clients that do not ask for an empty last response wait for this one."""
    counting = Counting()
    more = f"max_inflight_requests: {width}"
    async with shelf_with(count=(counting.count, COUNT), later=counting.later(0), one=add(1)) as shelf:
        chain = (x_to_y("count", "X", "t"), x_to_y("later", "t", "Y"))
        assert await streamed(ensemble_of(shelf, *chain, more), 3) == [0, 1, 2]
        assert await streamed(ensemble_of(shelf, *chain, more), 0) == [None]
        ensemble_of(shelf, *chain, more, name="inner")
        outer = ensemble_of(shelf, x_to_y("inner", "X", "t"), x_to_y("one", "t", "Y"))
        assert await streamed(outer, 3) == [1, 2, 3]


async def test_a_decoupled_step_that_ends_after_its_last_response_has_left_ends_the_stream_with_an_empty_one() -> None:
    read = threading.Event()

    def hold_back(batch: Batch) -> None:
        [call] = batch.calls
        call.send(InferResponse([Tensor("Y", "INT32", np.int32([[5]]))], final=False))
        read.wait(30)
        call.send(InferResponse(None))

    async with shelf_with(hold=(hold_back, COUNT.replace('"count"', '"hold"')), one=add(1)) as shelf:
        for steps in ([x_to_y("hold", "X", "Y")], [x_to_y("hold", "X", "t"), x_to_y("one", "t", "Y")]):
            read.clear()
            stream = ensemble_of(shelf, *steps).stream(request(X=[[1]]))
            first = await anext(aiter(stream))
            read.set()
            [end] = [response async for response in stream]
            assert (first.final, end.final, end.outputs) == (False, True, None)


async def test_every_request_through_two_decoupled_steps_ends_once() -> None:
    """With responses or without, and with steps that run at the same time: `streamed` looks at the flags."""
    sums = (add_up, config_of("both", SUM))
    async with shelf_with(count=COUNT_UP, one=add(1), ten=add(10), both=sums) as shelf:
        chain = (x_to_y("count", "X", "t"), x_to_y("one", "t", "u"), x_to_y("count", "u", "v"))
        fork = (x_to_y("one", "v", "a"), x_to_y("ten", "v", "b"), step("both", {"A": "a", "B": "b"}, {"Y": "Y"}))
        for width in (1, 3):
            model = ensemble_of(shelf, *chain, *fork, f"max_inflight_requests: {width}")
            found = await asyncio.gather(*(streamed(model, value) for value in range(5)))
            for value, values in enumerate(found):
                expected = [11 + 2 * inner for outer in range(1, value + 1) for inner in range(outer)]
                assert [each for each in values if each is not None] == expected
        await until(lambda: model.statistics.success.count == 5)
        assert model.statistics.fail.count == 0


async def test_the_last_response_with_the_final_flag_is_the_last_one_of_the_ensemble() -> None:
    def flagged(batch: Batch) -> None:
        for number in range(3):
            batch.calls[0].send(InferResponse([Tensor("Y", "INT32", np.int32([[number]]))], final=number == 2))

    async with shelf_with(flagged=(flagged, COUNT.replace('"count"', '"flagged"')), one=add(1)) as shelf:
        assert await streamed(ensemble_of(shelf, x_to_y("flagged", "X", "Y")), 0) == [0, 1, 2]
        chain = (x_to_y("flagged", "X", "t"), x_to_y("one", "t", "Y"))
        assert await streamed(ensemble_of(shelf, *chain), 0) == [1, 2, 3]
        twice = (x_to_y("flagged", "X", "t"), x_to_y("flagged", "t", "Y"))
        assert await streamed(ensemble_of(shelf, *twice), 0) == [*range(3)] * 3


async def test_decoupled_steps_behind_each_other() -> None:
    async with shelf_with(count=COUNT_UP, one=add(1)) as shelf:
        chain = (x_to_y("count", "X", "t"), x_to_y("one", "t", "u"), x_to_y("count", "u", "Y"))
        assert await streamed(ensemble_of(shelf, *chain), 3) == [0, 0, 1, 0, 1, 2, None]


async def test_an_error_in_the_midst_of_a_stream_is_its_end() -> None:
    async with shelf_with(count=COUNT_UP, one=add(1)) as shelf:
        for steps in ([x_to_y("count", "X", "Y")], [x_to_y("count", "X", "t"), x_to_y("one", "t", "Y")]):
            model = ensemble_of(shelf, *steps)
            *_, error = found = await streamed(model, 13)
            assert error.message.startswith("in ensemble 'e', ")
            assert "thirteen" in error.message
            assert found[:-1] == list(range(len(steps) - 1, len(steps) - 1 + len(found) - 1))
            assert model.statistics.failures == {"OTHER": 1}


async def test_a_reader_that_is_slow_holds_the_steps_back() -> None:
    async with shelf_with(count=COUNT_UP, one=add(1)) as shelf:
        model = ensemble_of(shelf, x_to_y("count", "X", "t"), x_to_y("one", "t", "Y"), "max_inflight_requests: 4")
        stream = model.stream(request(X=[[1000]]))
        counts = shelf.models["one"].statistics
        await until(lambda: counts.success.count >= 20)
        for _ in range(50):
            await asyncio.sleep(0)
        assert counts.success.count <= 16 + 4 + 1
        stream.close()
        await until(lambda: model.statistics.failures == {"CANCELED": 1})


async def test_inputs_of_different_decoupled_steps_do_not_meet() -> None:
    tensors = TWO_OUTPUTS
    async with shelf_with(count=COUNT_UP, one=add(1), both=(add_up, config_of("both", SUM))) as shelf:
        two = (x_to_y("count", "X", "a"), x_to_y("count", "X", "b"))
        with pytest.raises(
            InvalidRequestError, match=r"step 2 \(model 'both'\) receives inputs originated from .*: 'a'"
        ):
            ensemble_of(shelf, *two, step("both", {"A": "a", "B": "b"}, {"Y": "Y"}))
        with pytest.raises(InvalidRequestError, match=r"the outputs originate from different .*: 'Y' from step 0"):
            ensemble_of(shelf, x_to_y("count", "X", "Y"), x_to_y("one", "X", "Z"), tensors=tensors)


async def test_a_stream_that_another_task_closes_wakes_its_reader() -> None:
    waiting, gone = threading.Event(), threading.Event()

    def wait(batch: Batch) -> None:
        waiting.set()
        gone.wait(30)
        batch.scatter({"Y": batch.gather()["X"]})

    async with shelf_with(wait=wait) as shelf:
        stream = ensemble_of(shelf, x_to_y("wait", "X", "Y")).stream(request(X=[[1]]))
        reading = asyncio.create_task(stream.__anext__())
        await until(waiting.is_set)
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await reading
        gone.set()
