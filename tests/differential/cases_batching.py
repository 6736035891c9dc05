"""Which requests share an execution: ragged inputs, streams of decoupled models, and what of it is refused.

This Triton has the Python backend alone, which gets requests and no gathered tensors: that ragged inputs are flattened,
and what `batch_input` and `batch_output` do, cannot be compared with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from differential.cases_counts import counted
from differential.cases_http import model, tensor
from differential.cases_models import load, post
from differential.observe import Case, client, infer_request, message, stream
from differential.peers import Peer

KINDS = ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN")


def shapes(*pairs: tuple[list[int], list[int]], name: str = "ragged") -> Callable[[Peer], Any]:
    """Requests at the same time with these shapes of RAGGED and PLAIN: what each of them says it was executed with."""

    def ask(peer: Peer, ragged: list[int], plain: list[int]) -> Any:
        return post(peer, model(name), {"inputs": [zeros("RAGGED", ragged), zeros("PLAIN", plain)]})

    def run(peer: Peer) -> Any:
        with ThreadPoolExecutor(len(pairs)) as pool:
            return [asked.result() for asked in [pool.submit(ask, peer, *pair) for pair in pairs]]

    return run


def zeros(name: str, shape: list[int]) -> Any:
    return tensor(name, [0] * (shape[0] * shape[1]), shape)


def configured(peer: Peer, **fields: Any) -> str:
    """What is wrong with the model's configuration with these fields; empty if it is loaded so."""
    config = client(peer).get("/v2/models/ragged/config").json()
    del config["version_policy"], config["instance_group"], config["optimization"]
    answer = load(peer, "ragged", config=json.dumps(config | fields))["body"]
    return answer.get("error", "").rstrip() if answer else ""


def kinds(peer: Peer) -> str:
    """The other kinds of batch_input. Afterwards the model has its own configuration again."""
    try:
        return configured(peer, batch_input=[one for kind in KINDS for one in made(kind, target=kind)])
    finally:
        load(peer, "ragged")


def refused(peer: Peer) -> Any:
    """What Triton tells its log alone; tests/unit/gateway/models/repository/test_batch_checks.py has its words."""
    wrong: list[dict[str, Any]] = [
        {"batch_input": made(source=None)},
        {"batch_input": made(source="X")},
        {"batch_input": made(type="TYPE_INT64")},
        {"batch_output": divided(source=None)},
        {"batch_output": divided(source="X")},
        {"batch_output": divided(targets=["X"])},
        {"batch_output": divided(targets=["SEEN", "SEEN"])},
    ]
    return [configured(peer, **fields) != "" for fields in wrong]


def beside_sequences(peer: Peer) -> str:
    strategy = {"TRITON_BATCH_STRATEGY_PATH": {"string_value": "/nowhere/strategy.so"}}
    return configured(peer, parameters=strategy, dynamic_batching=None, sequence_batching={})


def made(
    kind: str = "BATCH_ELEMENT_COUNT", source: Any = "RAGGED", type: str = "TYPE_INT32", target: str = "COUNT"
) -> Any:
    return [{"kind": kind, "target_name": [target], "data_type": type, "source_input": [source] if source else []}]


def divided(source: Any = "RAGGED", targets: Any = ("SEEN",)) -> Any:
    return [
        {"target_name": targets, "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "source_input": [source] if source else []}
    ]


def repeated(n: int, rows: int = 1, fail_at: int = -1, **fields: Any) -> Any:
    content = [(name, struct.pack(f"<{rows}i", *[value] * rows)) for name, value in (("N", n), ("FAIL_AT", fail_at))]
    return infer_request("repeat_batched", *((name, "INT32", [rows, 1], raw) for name, raw in content), **fields)


def streams(*requests: Any) -> Callable[[Peer], Any]:
    """The responses of requests of one stream, by their ids; those of different ids may overtake each other."""

    def run(peer: Peer) -> Any:
        found = stream(peer, list(requests))
        return sorted(found, key=lambda each: each.get("infer_response", {}).get("id", ""))

    return run


def one_leaves(peer: Peer) -> Any:
    """Three streams in one batch; an endless one is given up after its first response."""
    with grpc.insecure_channel(peer.grpc) as channel, ThreadPoolExecutor(2) as pool:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        others = [pool.submit(stream, peer, [repeated(n, id=str(n))]) for n in (20, 30)]
        endless = stub.ModelStreamInfer(iter([repeated(-1, id="endless")]), timeout=30)
        first = message(next(endless))
        endless.cancel()
        return first, [other.result() for other in others]


CASES = [
    Case("batching: ragged requests", shapes(([1, 2], [1, 4]), ([1, 3], [1, 4]), ([1, 1], [1, 4]))),
    Case("batching: a ragged request of several rows", shapes(([2, 2], [2, 4]), ([1, 3], [1, 4]))),
    Case("batching: other inputs keep requests apart", shapes(([1, 2], [1, 1]), ([1, 2], [1, 2]), ([1, 2], [1, 3]))),
    Case(
        "batching: counts of a ragged batch",
        counted("ragged", shapes(([1, 2], [1, 4]), ([1, 3], [1, 4]), ([1, 1], [1, 4]))),
    ),
    Case("batching: the configuration", lambda peer: client(peer).get("/v2/models/ragged/config").json()),
    Case("batching: the metadata", lambda peer: client(peer).get("/v2/models/ragged").json()),
    Case("batching: kinds of batch_input", kinds),
    Case("batching: configurations that are refused", refused),
    Case("batching: a strategy beside sequences", beside_sequences),
    Case("batching: streams of one execution", streams(*(repeated(n, id=str(n)) for n in (2, 0, 5)))),
    Case("batching: streams of rows", streams(repeated(1, rows=2, id="1"), repeated(3, id="2"))),
    Case(
        "batching: an error in one of three streams",
        streams(repeated(3, id="1"), repeated(3, fail_at=1, id="2"), repeated(2, id="3")),
    ),
    Case(
        "batching: counts of streams", counted("repeat_batched", streams(*(repeated(n, id=str(n)) for n in (2, 1, 5))))
    ),
    Case("batching: one of three streams is cancelled", one_leaves),
]
