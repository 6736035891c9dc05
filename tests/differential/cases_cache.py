"""The response cache: what is found in it, and what of it statistics and metrics show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from differential.cases_counts import counted, summaries
from differential.cases_http import model, outputs, tensor
from differential.cases_models import post
from differential.observe import Case, call, client, infer_request, stream
from differential.peers import Peer

CACHED = model("cached")


def asked(*numbers: int, **more: Any) -> Callable[[Peer], Any]:
    body = {"inputs": [tensor("INPUT0", list(numbers), [1, len(numbers)], "INT32")], **more}
    return lambda peer: post(peer, CACHED, body)


def in_turn(*steps: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    return lambda peer: _from_zero([step(peer) for step in steps])


def all_of(*steps: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    return lambda peer: [step(peer) for step in steps]


def _from_zero(answers: Any) -> Any:
    """The numbers of TIMES without those of earlier cases: the two servers have not been asked equally often."""
    found: list[Any] = []
    for answer in answers:
        times = [each for each in answer.get("body", {}).get("outputs", ()) if each["name"] == "TIMES"]
        found += times
    first = found[0]["data"][0] if found else 0
    for each in found:
        each["data"][0] -= first
    return answers


def raw(*numbers: int) -> Any:
    data = b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)
    return infer_request("cached", ("INPUT0", "INT32", [1, len(numbers)], data), id="1")


def over_grpc(peer: Peer) -> Any:
    return call(peer, "ModelInfer", raw(40))


def on_a_stream(peer: Peer) -> Any:
    return stream(peer, [raw(40)])


def executions(step: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    def run(peer: Peer) -> Any:
        grown, _ = counted("cached", step)(peer)
        return grown.get("execution_count", 0)

    return run


def of_ensemble(peer: Peer) -> Any:
    return post(peer, model("ensemble_cached"), {"inputs": [tensor("A"), tensor("B")]})


def described(peer: Peer) -> Any:
    return client(peer).get("/v2/models/cached/config").json()["response_cache"]


CASES = [
    Case("metrics: summaries of a model with a cache", summaries("cached", asked(50), asked(50))),
    Case("cache: the same inputs", in_turn(asked(1, 2), asked(1, 2), asked(1, 3), asked(1, 2))),
    Case("cache: ids", in_turn(asked(10, id="a"), asked(10, id="b"))),
    Case("cache: errors", all_of(executions(asked(-1)), executions(asked(-1)))),
    Case("cache: all outputs, then one", in_turn(asked(20), asked(20, outputs=outputs("TIMES")))),
    Case("cache: one output, then all", in_turn(asked(21, outputs=outputs("TIMES")), asked(21))),
    Case("cache: parameters", in_turn(asked(30), asked(30, parameters={"mode": "x"}))),
    Case("cache: a sequence", in_turn(asked(70), asked(70, parameters={"sequence_id": 5, "sequence_start": True}))),
    Case("cache: over gRPC", all_of(*(counted("cached", way) for way in (over_grpc, over_grpc, on_a_stream)))),
    Case("cache: counts of a miss", counted("cached", asked(50))),
    Case("cache: counts of a hit", counted("cached", asked(50))),
    Case("cache: counts of two hits on a stream", counted("cached", on_a_stream, on_a_stream)),
    Case("cache: configuration", described),
    Case("cache: counts of an ensemble", counted("ensemble_cached", of_ensemble, of_ensemble)),
    Case("metrics: summaries of an ensemble with a cache", summaries("ensemble_cached", of_ensemble)),
]
