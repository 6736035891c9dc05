"""ModelStreamInfer: decoupled models and others, final flags, errors that leave the stream open."""

from __future__ import annotations

import struct
from typing import Any

from differential.cases_grpc import FOUR, PAIR, text
from differential.observe import Case, infer_request, parameter, stream

EMPTY_FINAL = {"triton_enable_empty_final_response": parameter(True)}
STRICT = (("triton_grpc_error", "true"),)


def repeat(n: int, fail_at: int = -1, **fields: Any) -> Any:
    numbers = (("N", n), ("FAIL_AT", fail_at))
    return infer_request("repeat", *((name, "INT32", [1], struct.pack("<i", v)) for name, v in numbers), **fields)


def one(name: str, *requests: Any, metadata: tuple[tuple[str, str], ...] = ()) -> Case:
    return Case(f"stream: {name}", lambda peer: stream(peer, list(requests), metadata))


# Triton's process ends after a strict stream whose model sends something behind its error: not compared here.
CASES = [
    one("nothing"),
    one("a model that is not decoupled", infer_request("add_sub", *PAIR, id="1")),
    one("two requests in turn", infer_request("add_sub", *PAIR, id="1")),
    one("three responses", repeat(3, id="9")),
    one("no response", repeat(0, id="9")),
    one("no response, empty final", repeat(0, id="9", parameters=EMPTY_FINAL)),
    one("three responses, empty final", repeat(3, id="9", parameters=EMPTY_FINAL)),
    one("not decoupled, empty final", infer_request("add_sub", *PAIR, id="1", parameters=EMPTY_FINAL)),
    one("an error first", repeat(2, 0, id="9")),
    one("an error in the middle", repeat(3, 1, id="9", parameters=EMPTY_FINAL)),
    one("an error of the model", infer_request("errors", ("CODE", "BYTES", [1, 1], text("NOT_FOUND")), id="2")),
    one("unknown model", infer_request("nowhere", *PAIR, id="3")),
    one("reserved parameter", infer_request("add_sub", *PAIR, id="3", parameters={"triton_x": parameter(1)})),
    one(
        "answers in the order of the requests",
        *(infer_request(model, *PAIR, id=f"{n}") for n, model in enumerate(("add_sub", "nowhere", "add_sub"))),
    ),
    one("missing input", infer_request("add_sub", PAIR[0], id="3")),
    one("wrong version", infer_request("add_sub", *PAIR, id="3", model_version="x")),
    one("wrong datatype", infer_request("add_sub", PAIR[0], ("INPUT1", "INT32", [4], FOUR), id="3")),
    one("strict, fine", repeat(2, id="9"), metadata=STRICT),
    one("strict, unknown model", infer_request("nowhere", *PAIR, id="3"), metadata=STRICT),
    one(
        "strict, an error of the model",
        infer_request("errors", ("CODE", "BYTES", [1, 1], text("NOT_FOUND"))),
        metadata=STRICT,
    ),
]
