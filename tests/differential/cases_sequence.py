"""Sequence batching: flags, ids, control tensors, slots, what ends a sequence, iterative sequences."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from differential.cases_counts import counted
from differential.observe import Case, Http, call, infer_request, parameter, stream
from differential.peers import Peer


def step(id: int | str, value: int, start: bool = False, end: bool = False, model: str = "sequence_direct") -> Any:
    """A request of a sequence; the id 0 is none."""
    flags: dict[str, Any] = {"sequence_start": parameter(start), "sequence_end": parameter(end)}
    if id:
        flags["sequence_id"] = parameter(id)
    return infer_request(model, ("INPUT", "INT32", [1, 1], struct.pack("<i", value)), parameters=flags)


def largest(start: bool) -> Any:
    """Of the largest id that there is."""
    request = step(0, 3, start, not start)
    request.parameters["sequence_id"].int64_param = 2**63 - 1
    return request


def with_empty_id() -> Any:
    request = step(0, 1, True, True)
    request.parameters["sequence_id"].string_param = ""
    return request


def in_turn(*requests: Any) -> Callable[[Peer], Any]:
    """Each after the answer to the one before it."""
    return lambda peer: [call(peer, "ModelInfer", request) for request in requests]


def oldest(id: int | str, value: int, start: bool = False, end: bool = False) -> Any:
    return step(id, value, start, end, "sequence_oldest")


def idle(peer: Peer) -> Any:
    """A request after `max_sequence_idle_microseconds`."""
    first = call(peer, "ModelInfer", oldest("idle", 1, start=True))
    time.sleep(2)
    return first, call(peer, "ModelInfer", oldest("idle", 1)), call(peer, "ModelInfer", oldest("idle", 1, True, True))


def backlog(peer: Peer) -> Any:
    """Three sequences where two have slots: the third one's requests wait until one of these ends."""
    with ThreadPoolExecutor(1) as threads:
        begun = [call(peer, "ModelInfer", oldest(name, 1, start=True)) for name in ("one", "two")]
        steps = [oldest("three", 5, start=True), oldest("three", 6, end=True)]
        ends = [oldest(name, 1, end=True) for name in ("one", "two")]
        for request in (*steps, *ends):
            request.outputs.add(name="SUM")  # the other one tells which requests share a batch
        third = threads.submit(stream, peer, steps)
        time.sleep(0.1)
        waited = not third.done()
        ended = [call(peer, "ModelInfer", request) for request in ends]
        return begun, waited, ended, third.result()


def backlog_timeout(peer: Peer) -> Any:
    begun = [call(peer, "ModelInfer", oldest(name, 1, start=True)) for name in ("one", "two")]
    late = oldest("three", 5, start=True)
    late.parameters["timeout"].int64_param = 100_000
    answers = stream(peer, [late, oldest("three", 6), oldest("three", 6, end=True)])
    return begun, answers, [call(peer, "ModelInfer", oldest(name, 1, end=True)) for name in ("one", "two")]


def cancelled(peer: Peer) -> Any:
    """A client leaves while its request waits in the backlog: the sequence is gone."""
    begun = [call(peer, "ModelInfer", oldest(name, 1, start=True)) for name in ("one", "two")]
    left = call(peer, "ModelInfer", oldest("three", 1, start=True), seconds=0.3)
    ended = [call(peer, "ModelInfer", oldest(name, 1, end=True)) for name in ("one", "two")]
    time.sleep(0.1)
    return begun, left["code"], ended, call(peer, "ModelInfer", oldest("three", 1))


def two_of_four(peer: Peer) -> Any:
    """Half of the slots have to be in use, or a request waits for its time; the second one ends the wait."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(call, peer, "ModelInfer", step(1, 1, True, True, "sequence_waits"))
        time.sleep(0.05)
        second = threads.submit(call, peer, "ModelInfer", step(2, 2, True, True, "sequence_waits"))
        return first.result(), second.result()


def reloaded(peer: Peer) -> Any:
    begun = call(peer, "ModelInfer", oldest("before", 1, start=True))
    call(peer, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="sequence_oldest"))
    call(peer, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="sequence_oldest"))
    call(peer, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="sequence_oldest"))
    return begun, call(peer, "ModelInfer", oldest("before", 1))


def http(name: str, parameters: dict[str, Any], shape: tuple[int, int] = (1, 1)) -> Case:
    tensor = {"name": "INPUT", "datatype": "INT32", "shape": shape, "data": [3] * shape[0]}
    body = {"inputs": [tensor], "parameters": parameters, "outputs": [{"name": "SUM"}]}
    return Http(f"sequence, {name}", "POST", "/v2/models/sequence_direct/infer", body, exact=False).case()


def count_down(n: int, **fields: Any) -> Any:
    return infer_request("sequence_iterative", ("INPUT", "INT32", [1, 1], struct.pack("<i", n)), **fields)


INTERLEAVED = [
    step(5, 1, start=True),
    step(6, 2, start=True),
    step(7, 3, start=True),
    step(6, 4),
    step(7, 5),
    step(5, 6, end=True),
    step(7, 7, end=True),
    step(6, 8, end=True),
]
"""Three sequences: the batches have slots without a request."""

CASES = [
    Case("sequence: start, go on, end", in_turn(step(1, 1, start=True), step(1, 2), step(1, 3, end=True), step(1, 4))),
    Case("sequence: one request", in_turn(step(2, 5, True, True), step(2, 5))),
    Case("sequence: without a start", in_turn(step(3, 1))),
    Case("sequence: without an id", in_turn(step(0, 1, True, True))),
    Case("sequence: an empty id", in_turn(with_empty_id())),
    Case(
        "sequence: started again",
        in_turn(step(4, 1, start=True), step(4, 2), step(4, 10, start=True), step(4, 1, end=True)),
    ),
    Case(
        "sequence: several have slots of their own",
        in_turn(*INTERLEAVED),
    ),
    Case(
        "sequence: oldest",
        in_turn(
            oldest("a", 1, start=True), oldest("b", 2, start=True), oldest("a", 3, end=True), oldest("b", 4, end=True)
        ),
    ),
    Case("sequence: no start, id of letters", in_turn(oldest("nobody", 1))),
    Case(
        "sequence: a number and a text of its digits are two",
        in_turn(oldest(5, 1, start=True), oldest("5", 2, start=True), oldest(5, 3, end=True), oldest("5", 4, end=True)),
    ),
    Case("sequence: the last number", in_turn(largest(True), largest(False))),
    Case("sequence: idle", idle),
    Case("sequence: backlog", backlog),
    Case("sequence: backlog, time is over", backlog_timeout),
    Case("sequence: backlog, the client leaves", cancelled),
    Case("sequence: loaded again", reloaded),
    Case("sequence: half of the slots", two_of_four),
    Case("sequence: less than half of the slots", in_turn(step(1, 1, True, True, "sequence_waits"))),
    Case("sequence: counts", counted("sequence_direct", in_turn(*INTERLEAVED))),
    Case("sequence: counts of errors", counted("sequence_direct", in_turn(step(20, 1), step(0, 1, True)))),
    Case("sequence: counts, iterative", counted("sequence_iterative", lambda peer: stream(peer, [count_down(3)]))),
    Case(
        "sequence: on one stream",
        lambda peer: stream(peer, [step(8, 1, start=True), step(8, 2), step(8, 3), step(8, 4, end=True)]),
    ),
    Case("sequence: no start on a stream", lambda peer: stream(peer, [step(9, 1)])),
    http("whole", {"sequence_id": 10, "sequence_start": True, "sequence_end": True}),
    http("no start", {"sequence_id": 11}),
    http("no id", {}),
    http("batch of two", {"sequence_id": 12, "sequence_start": True}, (2, 1)),
    Case("sequence: iterative", lambda peer: stream(peer, [count_down(3, id="1")])),
    Case("sequence: iterative, once", lambda peer: stream(peer, [count_down(0, id="1")])),
    Case(
        "sequence: iterative, empty final",
        lambda peer: stream(
            peer, [count_down(2, id="1", parameters={"triton_enable_empty_final_response": parameter(True)})]
        ),
    ),
    Case(
        "sequence: the configurations",
        lambda peer: [
            call(peer, "ModelConfig", pb.ModelConfigRequest(name=f"sequence_{name}"))
            for name in ("direct", "oldest", "iterative")
        ],
    ),
]
