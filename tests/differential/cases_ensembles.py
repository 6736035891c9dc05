"""Ensembles: what they tell of themselves, answer, stream and count, and how they come and go with their models."""

from __future__ import annotations

import json
import struct
from typing import Any

from differential.cases_counts import counted, summaries
from differential.cases_describe import get
from differential.cases_grpc import FOUR
from differential.cases_http import infer, model, outputs, tensor, text
from differential.cases_models import bls, post
from differential.cases_stream import EMPTY_FINAL
from differential.observe import Case, call, client, infer_request, stream
from differential.peers import Peer

BOTH = [tensor("A"), tensor("B")]
ENSEMBLE = model("ensemble")
BATCHED = model("ensemble_batched")
FIVE = {"inputs": [tensor("X", [0.5, 3, -1, 7, 2, 1, 2, 3, 4, 5], [2, 5])]}
PAIR = (("A", "FP32", [4], FOUR), ("B", "FP32", [4], FOUR))


def number(name: str, value: int) -> tuple[str, str, list[int], bytes]:
    return name, "INT32", [1], struct.pack("<i", value)


def streamed(
    what: str, *inputs: tuple[str, str, list[int], bytes], name: str = "ensemble_stream", **fields: Any
) -> Case:
    request = infer_request(name, *inputs, id="9", **fields)
    return Case(f"ensemble: stream, {what}", lambda peer: stream(peer, [request]))


def failing(peer: Peer) -> Any:
    return post(peer, model("ensemble_errors"), {"inputs": [text("CODE", "NOT_FOUND", (1, 1))]})


def fine(peer: Peer) -> Any:
    return post(peer, ENSEMBLE, {"inputs": BOTH})


def nested(peer: Peer) -> Any:
    return post(peer, model("ensemble_nested"), {"inputs": BOTH})


def states(peer: Peer) -> dict[str, Any]:
    index = client(peer).post("/v2/repository/index", json={}).json()
    names = ("ensemble_stream", "increment")
    return {entry["name"]: entry.get("state") == "READY" for entry in index if entry["name"] in names}


def control(peer: Peer, what: str, name: str, **parameters: bool) -> Any:
    body = {"parameters": parameters} if parameters else {}
    answer = client(peer).post(f"/v2/repository/models/{name}/{what}", json=body)
    return answer.status_code, states(peer)


def comes_and_goes(peer: Peer) -> Any:
    return [
        control(peer, "unload", "increment"),
        control(peer, "load", "increment"),
        control(peer, "unload", "ensemble_stream"),
        control(peer, "load", "ensemble_stream"),
    ]


def loaded(peer: Peer, **changes: Any) -> Any:
    """What comes of loading the ensemble in another form. Ours keeps what it had, Triton's is gone then."""
    step = {
        "model_name": "add_sub",
        "model_version": -1,
        "input_map": {"INPUT0": "A", "INPUT1": "B"},
        "output_map": {"OUTPUT0": "TWICE_A"},
    }
    config = {
        "platform": "ensemble",
        "input": [{"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in "AB"],
        "output": floats(4),
        "ensemble_scheduling": {"step": [step | changes.pop("step", {})]},
    }
    body = {"parameters": {"config": json.dumps(config | changes)}}
    return client(peer).post("/v2/repository/models/ensemble/load", json=body).status_code


def floats(size: int) -> list[dict[str, Any]]:
    return [{"name": "TWICE_A", "data_type": "TYPE_FP32", "dims": [size]}]


def refused(what: str, **changes: Any) -> Case:
    return Case(f"ensemble: load, {what}", lambda peer: loaded(peer, **changes))


# Of several outputs Triton gives the sequence several times in one answer. Whether the last response of a stream is
# marked as such depends on what is first, its step or the end of the decoupled one: here one is clearly the slower.
CASES = [
    *(get(f"/v2/models/{name}") for name in ("ensemble", "ensemble_stream")),
    *(get(f"/v2/models/{name}/config", exact=False) for name in ("ensemble", "ensemble_stream")),
    infer("ensemble: infer", {"inputs": BOTH}, ENSEMBLE),
    infer("ensemble: id and sequence", {"inputs": BOTH, "id": "7", "parameters": {"sequence_id": 5}}, ENSEMBLE),
    infer("ensemble: a listed output", {"inputs": BOTH, "outputs": outputs("TWICE_A")}, ENSEMBLE),
    infer("ensemble: unknown output", {"inputs": BOTH, "outputs": outputs("difference")}, ENSEMBLE),
    infer("ensemble: a missing input", {"inputs": BOTH[:1]}, ENSEMBLE),
    infer("ensemble: a wrong shape", {"inputs": [tensor("A", [1, 2]), BOTH[1]]}, ENSEMBLE),
    *(
        infer(f"ensemble: nested, {what}", {"inputs": [*BOTH, *more]}, model("ensemble_nested"))
        for what, more in (("an optional input", [tensor("BIAS", [10])]), ("without it", []))
    ),
    infer("ensemble: a batch", {"inputs": [tensor("X", [*range(10)], [2, 5])]}, BATCHED),
    infer("ensemble: a batch too large", {"inputs": [tensor("X", [*range(25)], [5, 5])]}, BATCHED),
    infer("ensemble: classes", FIVE | {"outputs": outputs("CLASSES", classification=2)}, BATCHED),
    Case("ensemble: counts of a nested one", counted("ensemble", nested)),
    infer("ensemble: infer, decoupled", {"inputs": [tensor("N", [1], datatype="INT32")]}, model("ensemble_stream")),
    infer("ensemble: an error of a step", {"inputs": [text("CODE", "NOT_FOUND", (1, 1))]}, model("ensemble_errors")),
    infer("ensemble: an input as output", {"inputs": BOTH, "outputs": outputs("SUM", "A")}, model("ensemble_pass")),
    Case("ensemble: over gRPC", lambda peer: call(peer, "ModelInfer", infer_request("ensemble", *PAIR, id="3"))),
    Case("ensemble: stream, not decoupled", lambda peer: stream(peer, [infer_request("ensemble", *PAIR, id="1")])),
    streamed("no response", number("N", 0)),
    streamed("no response, empty final", number("N", 0), parameters=EMPTY_FINAL),
    streamed("an error first", number("N", 2), number("FAIL_AT", 0)),
    *(
        streamed(f"{what}{how}", *inputs, name=name, parameters=parameters)
        for name, what, inputs in (
            ("ensemble_late", "the last response", (number("N", 3),)),
            ("ensemble_late", "one response", (number("N", 1),)),
            ("ensemble_late", "a later error", (number("N", 3), number("FAIL_AT", 2))),
            ("ensemble_direct", "the end of the step", (number("N", 3),)),
            ("ensemble_direct", "nothing but the end", (number("N", 0),)),
            ("ensemble_direct", "an error behind two", (number("N", 3), number("FAIL_AT", 2))),
        )
        for how, parameters in (("", {}), (", empty final", EMPTY_FINAL))
    ),
    bls("ensemble"),
    Case("counts: an ensemble", counted("ensemble", fine)),
    Case("metrics: summaries of an ensemble", summaries("ensemble", fine)),
    Case("counts: the models of an ensemble", counted("add_sub", fine)),
    Case("counts: an ensemble, errors", counted("ensemble_errors", failing)),
    Case("ensemble: comes and goes with its models", comes_and_goes),
    refused("an unknown model", step={"model_name": "nowhere"}),
    refused("an unknown version", step={"model_version": 9}),
    refused("an unknown input", step={"input_map": {"INPUT0": "A", "INPUT9": "B"}}),
    refused("another shape", output=floats(5)),
    refused("itself", step={"model_name": "ensemble", "input_map": {"A": "A", "B": "B"}}),
]
