"""What models ask of the server: other models, the control of models, metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.python_backend import CPU, FakeHost, instances, loaded, outputs, request

INNER = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            x = r.inputs()[0].as_numpy()
            if (x < 0).any(): raise ValueError("negative")
            about = np.array([repr((r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters()))], "O")
            responses.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", x * 2), pb_utils.Tensor("ABOUT", about)], parameters={"p": 1}))
        return responses
"""
INNER_CONFIG = f"""
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "ABOUT" data_type: TYPE_STRING dims: [ 1 ] }} ]
{CPU}
"""
REPEAT = """
import time
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            s = r.get_response_sender()
            count = int(r.inputs()[0].as_numpy()[0])
            if count < 0:  # it goes on when it has been asked to stop
                s.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([-1], np.float32))]))
                while not s.is_cancelled(): time.sleep(0.001)
            for i in range(abs(count)):
                if count > 0 and s.is_cancelled(): break
                s.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([i], np.float32))]))
            s.send(flags=1)
"""
REPEAT_CONFIG = f"""
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
model_transaction_policy {{ decoupled: true }}
{CPU}
"""
OUTER_CONFIG = f"""
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "SAID" data_type: TYPE_STRING dims: [ 1 ] }} ]
{CPU}
"""
HELPERS = """
def ask(x, name="inner", outputs=("Y",), **more):
    inputs = [pb_utils.Tensor("X", np.array(x, np.float32))]
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=list(outputs), inputs=inputs, **more)
def y(response):
    if response.has_error():
        return (int(response.error().code()), response.error().message())
    return [t.as_numpy().tolist() for t in response.output_tensors()]
"""


async def said(folder: Path, body: str, *, prefix: str = "", host: FakeHost | None = None) -> Any:
    """What the body, of `execute`, returns, with two models to ask."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    code = f"""{HELPERS}
import asyncio
class TritonPythonModel:
    {prefix}def said(self, x):
{lines}
    {prefix}def execute(self, requests):
        said = {"await " if prefix else ""}self.said(requests[0].inputs()[0].as_numpy())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([repr(said)], np.object_))])]
"""
    host = host or FakeHost()
    async with (
        loaded(folder, INNER, INNER_CONFIG, name="inner", host=host),
        loaded(folder, REPEAT, REPEAT_CONFIG, name="repeat", host=host),
        loaded(folder, code, OUTER_CONFIG, name="outer", host=host) as outer,
    ):
        response = await asyncio.wait_for(outer.infer(request(X=np.ones(1, np.float32))), 60)
        return eval(outputs(response)["SAID"][0])


async def test_another_model_is_executed(tmp_path: Path) -> None:
    assert await said(tmp_path, "return y(ask([1, 2]).exec())") == [[2, 4]]


async def test_large_tensors_go_both_ways(tmp_path: Path) -> None:
    body = "r = ask(np.arange(100_000)).exec()\nreturn float(r.output_tensors()[0].as_numpy().sum(dtype=np.float64))"
    assert await said(tmp_path, body) == 2 * sum(range(100_000))


async def test_all_that_a_request_can_say(tmp_path: Path) -> None:
    body = """
r = ask([1], outputs=["ABOUT"], request_id="i", correlation_id=9, flags=3, timeout=7, parameters={"k": True},
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU), trace=pb_utils.InferenceTrace())
response = r.exec()
return y(response), response.parameters()
"""
    [[about]], parameters = await said(tmp_path, body)
    assert eval(about) == ("i", 9, 3, 7, '{"k":true}')
    assert parameters == '{"p": 1}'


async def test_errors_of_the_other_model(tmp_path: Path) -> None:
    body = """
return [y(ask([-1]).exec()), y(ask([1], name="nope").exec()), y(ask([1], name="repeat").exec()),
        y(pb_utils.InferenceRequest(model_name="inner", requested_output_names=["Y"], inputs=[]).exec())]
"""
    [raised, unknown, decoupled, invalid] = await said(tmp_path, body)
    start = "Model inner - Error when running inference: "
    assert raised == (
        1,
        start + "Failed to process the request(s) for model 'inner_0_0', message: ValueError: negative",
    )
    assert unknown == (
        2,
        "Model nope - Error when running inference: Failed for execute the inference request. Model 'nope' is not "
        "ready.",
    )
    assert "Please use 'decoupled=True' argument" in decoupled[1]
    assert invalid[0] == 3
    assert invalid[1].startswith(start)


async def test_many_at_once(tmp_path: Path) -> None:
    body = """
found = await asyncio.gather(*(ask([i]).async_exec() for i in range(20)))
return [y(one)[0][0] for one in found]
"""
    assert await said(tmp_path, body, prefix="async ") == [2 * index for index in range(20)]


async def test_from_threads_of_the_model(tmp_path: Path) -> None:
    body = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    return list(pool.map(lambda i: y(ask([i]).exec())[0][0], range(20)))
"""
    assert await said(tmp_path, body) == [2 * index for index in range(20)]


async def test_while_the_model_is_loaded_and_from_a_thread_without_requests(tmp_path: Path) -> None:
    """Report server#5815: a thread that begins in `initialize` has another model look at what it fetches."""
    code = f"""{HELPERS}
import queue, threading
class TritonPythonModel:
    def initialize(self, args):
        self.first, self.found = y(ask([1]).exec()), queue.Queue()
        threading.Thread(target=lambda: self.found.put(y(ask([2]).exec())), daemon=True).start()

    def execute(self, requests):
        said = repr((self.first, self.found.get(timeout=30)))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([said], np.object_))])]
"""
    host = FakeHost()
    async with (
        loaded(tmp_path, INNER, INNER_CONFIG, name="inner", host=host),
        loaded(tmp_path, code, OUTER_CONFIG, name="outer", host=host) as outer,
    ):
        assert outputs(await outer.infer(request(X=np.ones(1, np.float32))))["SAID"][0] == b"([[2.0]], [[4.0]])"


async def test_a_decoupled_model(tmp_path: Path) -> None:
    body = "return [y(one) for one in ask([3], name='repeat').exec(decoupled=True)]"
    assert await said(tmp_path, body) == [[[0]], [[1]], [[2]], []]


async def test_a_long_stream_waits_for_its_reader(tmp_path: Path) -> None:
    body = "return sum(len(one.output_tensors()) for one in ask([500], name='repeat').exec(decoupled=True))"
    assert await said(tmp_path, body) == 500


async def test_a_stream_is_read_again_and_cancelling_it_only_asks(tmp_path: Path) -> None:
    """As in Triton: what the other model still sends comes. One that has not begun with the request has nothing to
    send, and an error comes for it."""
    body = """
responses = ask([-3], name=b"repeat", outputs=[b"Y"]).exec(decoupled=True)
first = next(responses)
waiting = ask([1], name="repeat").exec(decoupled=True)
waiting.cancel()
refused = [one.error().code() == pb_utils.TritonError.CANCELLED for one in waiting]
responses.cancel()
return y(first), [y(one) for one in responses], [y(one) for one in responses], refused
"""
    rest = [[[0]], [[1]], [[2]], []]
    assert await said(tmp_path, body) == ([[-1]], rest, [[[-1]], *rest], [True])


async def test_a_decoupled_model_is_awaited_until_its_first_response(tmp_path: Path) -> None:
    """The loop goes on meanwhile; a task that gives up ends the request."""
    gate = tmp_path / "gate"
    body = f"""
import pathlib, time
async def one(x):
    return [y(each) for each in await ask([x], name="repeat").async_exec(decoupled=True)]
async def left():
    try: await asyncio.wait_for(ask([-1], name="repeat").async_exec(decoupled=True), 0)
    except (TimeoutError, asyncio.TimeoutError): return "left"
waiting = asyncio.ensure_future(ask([7], name="held").async_exec(decoupled=True))
others = await asyncio.gather(one(1), left(), one(0))
was_done = waiting.done()
pathlib.Path({str(gate)!r}).touch()
return others, was_done, [y(each) for each in await waiting]
"""
    held = f"""
import pathlib, time
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.001)
            tensor = pb_utils.Tensor("Y", r.inputs()[0].as_numpy())
            r.get_response_sender().send(pb_utils.InferenceResponse([tensor]), flags=1)
"""
    host = FakeHost()
    async with loaded(tmp_path, held, REPEAT_CONFIG, name="held", host=host):
        found = await said(tmp_path, body, prefix="async ", host=host)
    assert found == ([[[[0]], []], "left", [[]]], False, [[[7]]])


async def test_a_stream_that_is_let_go_is_cancelled(tmp_path: Path) -> None:
    body = """
responses = ask([2000], name="repeat").exec(decoupled=True)
next(responses)
del responses
return y(ask([1]).exec())
"""
    assert await said(tmp_path, body) == [[2]]


async def test_a_stream_that_is_let_go_gives_its_memory_back(tmp_path: Path) -> None:
    """Large responses that nobody reads lie in memory that the server shares with the model's process."""
    host, size = FakeHost(), 80_000
    long = REPEAT.replace("np.array([i], np.float32)", f"np.full({size} // 4, i, np.float32)")
    code = f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        unread = ask([40], name="repeat").exec(decoupled=True)
        list(ask([1], name="repeat").exec(decoupled=True))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([""], np.object_))])]
"""
    async with (
        loaded(tmp_path, long, REPEAT_CONFIG, name="repeat", host=host),
        loaded(tmp_path, code, OUTER_CONFIG, name="outer", host=host) as outer,
    ):
        [instance] = instances(outer)
        for _ in range(3):
            await asyncio.wait_for(outer.infer(request(X=np.ones(1, np.float32))), 60)
        # of each of the three streams there were 32
        assert instance._session._link.outbox.used <= 40 * size


async def test_errors_of_a_stream(tmp_path: Path) -> None:
    body = "return [y(one) for one in ask([1], name='nope').exec(decoupled=True)]"
    [(code, text)] = await said(tmp_path, body)
    assert code == 2
    assert text.startswith("Model nope - Error when running inference: ")


async def test_models_are_controlled(tmp_path: Path) -> None:
    host = FakeHost()
    body = """
pb_utils.load_model("plain")
pb_utils.load_model(model_name="given", config='{"a": 1}', files={"file:1/model.bin": b"x" * 100_000, "file:l": b"y"})
pb_utils.unload_model("plain", unload_dependents=True)
try: pb_utils.load_model("broken")
except pb_utils.TritonModelException as error: said = str(error)
return pb_utils.is_model_ready("inner"), pb_utils.is_model_ready("inner", "1"), pb_utils.is_model_ready("nope"), said
"""
    found = await said(tmp_path, body, host=host)
    assert found == (
        True,
        True,
        False,
        "Failed to load model: Failed to process the request for model 'outer_0_0', message: failed to load 'broken', "
        "no such model",
    )
    assert host.loads == [
        ("plain", None, {}),
        ("given", '{"a": 1}', {"1/model.bin": b"x" * 100_000, "l": b"y"}),
    ]
    assert host.unloads == [("plain", True)]


async def test_a_metric_is_known_once_however_often_a_model_asks_for_it(tmp_path: Path) -> None:
    code = f"""{HELPERS}
class TritonPythonModel:
    def execute(self, requests):
        family = pb_utils.MetricFamily(name="c", description="d", kind=pb_utils.MetricFamily.COUNTER)
        for kind in "abab":
            family.Metric(labels={{"kind": kind}}).increment(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([""], np.object_))])]
"""
    host = FakeHost()
    async with loaded(tmp_path, code, OUTER_CONFIG, host=host) as model:
        for _ in range(2):
            await asyncio.wait_for(model.infer(request(X=np.ones(1, np.float32))), 60)
        [instance] = instances(model)
        assert len(instance._session._host_calls._metrics) == 2
    assert [metric.current for metric in host.metrics.values()] == [4, 4]


async def test_metrics_count_as_their_kind_allows_and_refuse_the_rest(tmp_path: Path) -> None:
    host = FakeHost()
    body = """
family = pb_utils.MetricFamily(name="c", description="d", kind=pb_utils.MetricFamily.COUNTER)
counter = family.Metric(labels={"a": "b"})
counter.increment(2)
counter.increment(3)
gauge = pb_utils.MetricFamily(name="g", description="d", kind=pb_utils.MetricFamily.GAUGE).Metric(labels={})
gauge.set(7)
gauge.increment(-1)
histogram = pb_utils.MetricFamily(name="h", description="d", kind=pb_utils.MetricFamily.HISTOGRAM)
times = histogram.Metric(labels={}, buckets=[1.0, 2.0])
times.observe(1.5)
def refused(call, *arguments, **named):
    try: call(*arguments, **named)
    except pb_utils.TritonModelException as error: return str(error)
return counter.value(), gauge.value(), [
    refused(counter.increment, -1), refused(counter.set, 1), refused(gauge.observe, 1), refused(times.value),
    refused(times.increment, 1), refused(histogram.Metric, labels={}), refused(family.Metric, buckets=[1]),
    refused(family.Metric, labels=3),
    refused(pb_utils.MetricFamily, "c", "d", pb_utils.MetricFamily.GAUGE),
    refused(family.Metric, labels={"a": [1]}),
]
"""
    counter, gauge, refusals = await said(tmp_path, body, host=host)
    assert (counter, gauge) == (5, 6)
    assert host.metrics["h", ()].observed == [1.5]
    assert host.metrics["c", (("a", "b"),)].current == 5
    assert all(refusals)
    assert refusals[0].startswith("Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be")
    assert refusals[5] == "Failed to create metric. Missing required buckets."
    assert refusals[8] == "Error when creating MetricFamily: the metric 'c' is a COUNTER"


async def test_a_process_that_the_model_has_forked_asks_through_the_model_s_own(tmp_path: Path) -> None:
    body = """
import asyncio, multiprocessing
global child, later
async def later(x): return y(await ask([x]).async_exec())
def child(x):
    pb_utils.Logger.log_info("from a child")
    large = ask([x] * 100_000).exec().output_tensors()[0].as_numpy()
    awaited = asyncio.run(later(x))
    errors = y(ask([-1]).exec())[1][-8:], y(ask([1], name="nowhere").exec())[1][:13]
    return y(ask([x]).exec()), awaited, *errors, large.sum()
with multiprocessing.get_context("fork").Pool(2) as pool:
    found = pool.map(child, [1, 2, 3])
return found, y(ask([4]).exec())
"""
    found = [([[2.0 * x]], [[2.0 * x]], "negative", "Model nowhere", 200_000 * x) for x in (1, 2, 3)]
    assert await said(tmp_path, body) == (found, [[8]])


async def test_a_process_that_the_model_has_forked_asks_for_no_stream_and_outlives_no_model(tmp_path: Path) -> None:
    body = """
import os
def refused(read, what):
    try: what()
    except pb_utils.TritonModelException as error: os.write(read, (str(error) + "|").encode())
read, write = os.pipe()
child = os.fork()
if not child:
    refused(write, lambda: ask([1]).exec(decoupled=True))
    refused(write, lambda: pb_utils.is_model_ready("inner"))
    os._exit(0)
os.waitpid(child, 0)
return os.read(read, 1000).decode()
"""
    refused = "The server cannot be asked here: only the model's own process is connected to it.|"
    assert await said(tmp_path, body) == refused * 2


@pytest.mark.parametrize(("leaves", "status"), [("sys.exit(7)", 7), ("raise RuntimeError", 1), ("return None", 0)])
async def test_a_process_that_the_model_has_forked_ends_where_it_leaves_the_model(
    tmp_path: Path, leaves: str, status: int
) -> None:
    """It does not wait for the model's next requests, which it would take from the model."""
    body = f"""
import os, sys
child = os.fork()
if not child:
    {leaves}
return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), y(ask([4]).exec())
"""
    assert await said(tmp_path, body) == (status, [[8]])
