"""Inference over HTTP: JSON, binary, raw binary, parameters, classification, compression."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from typing import Any

from differential.observe import Case, Http

ADD = "/v2/models/add_sub/infer"
FOUR = struct.pack("<4f", 1, 2, 3, 4)


def tensor(name: str, data: Any = None, shape: Any = None, datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    data = [1, 2, 3.5, -4] if data is None else data
    return {"name": name, "shape": [len(data)] if shape is None else shape, "datatype": datatype, "data": data, **more}


def text(name: str, value: str, shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return tensor(name, [value], list(shape), "BYTES")


def outputs(*names: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"name": name, "parameters": parameters} if parameters else {"name": name} for name in names]


GOOD = [tensor("INPUT0"), tensor("INPUT1")]


def infer(name: str, body: Any, path: str = ADD, **headers: str) -> Case:
    return Http(name, "POST", path, body, {key.replace("_", "-"): value for key, value in headers.items()}).case()


def model(name: str) -> str:
    return f"/v2/models/{name}/infer"


def binary(name: str, body: dict[str, Any], content: bytes, path: str = ADD, length: str | None = None) -> Case:
    header = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(header)) if length is None else length}
    return Http(name, "POST", path, header + content, headers).case()


def sized(name: str, size: int, shape: Any = (4,), datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "datatype": datatype, "parameters": {"binary_data_size": size}}


PAIR = [sized("INPUT0", 16), sized("INPUT1", 16)]
ROW = [tensor("INPUT0", shape=[1, 4]), tensor("INPUT1", shape=[1, 4])]
FIVE = {"inputs": [tensor("INPUT0", [0.5, 3, -1, 7, 2, 1, 2, 3, 4, 5], [2, 5])]}

TENSORS = [
    infer("infer", {"inputs": GOOD}),
    infer("infer, id", {"id": "x y", "inputs": GOOD}),
    infer("infer, nested data", {"inputs": [tensor("INPUT0", [[1, 2], [3, 4]], [4]), GOOD[1]]}),
    infer("infer, one output", {"inputs": GOOD, "outputs": outputs("OUTPUT1")}),
    infer("infer, outputs in another order", {"inputs": GOOD, "outputs": outputs("OUTPUT1", "OUTPUT0")}),
    infer("infer, inputs in another order", {"inputs": GOOD[::-1]}),
    infer("infer, no outputs asked", {"inputs": GOOD, "outputs": []}),
    infer("infer, version", {"inputs": GOOD}, "/v2/models/add_sub/versions/1/infer"),
    infer("infer, unknown members", {"inputs": GOOD, "more": {"a": [1]}}),
    infer("infer, unknown input parameter", {"inputs": [GOOD[0] | {"parameters": {"x": 1}}, GOOD[1]]}),
    infer(
        "infer, floats", {"inputs": [tensor("INPUT0", [1e-7, 3.1415927, 1e30, 16777216]), tensor("INPUT1", [0] * 4)]}
    ),
    infer("infer, batch", {"inputs": [tensor(f"INPUT{i}", [*range(8)], [2, 4]) for i in (0, 1)]}, model("batched")),
    infer(
        "infer, batch too large", {"inputs": [tensor(f"INPUT{i}", [0] * 36, [9, 4]) for i in (0, 1)]}, model("batched")
    ),
    infer("infer, no batch dimension", {"inputs": GOOD}, model("batched")),
    infer("infer, batches differ", {"inputs": [ROW[0], tensor("INPUT1", [0] * 8, [2, 4])]}, model("batched")),
    infer(
        "infer, strings",
        {"inputs": [tensor("INPUT0", ["", "é€𝄞", 'a"\\\n\t\x01/', "b"], datatype="BYTES")]},
        model("strings"),
    ),
    infer("infer, no elements", {"inputs": [tensor("INPUT0", [], [0], "BYTES")]}, model("strings")),
    infer(
        "infer, variable dimensions",
        {"inputs": [tensor("INPUT0", [*range(12)], [2, 2, 3], "INT32")]},
        model("wildcard"),
    ),
    infer(
        "infer, wrong fixed dimension",
        {"inputs": [tensor("INPUT0", [*range(8)], [1, 2, 4], "INT32")]},
        model("wildcard"),
    ),
    infer("infer, wrong rank", {"inputs": [tensor("INPUT0", [*range(6)], [2, 3], "INT32")]}, model("wildcard")),
    infer("infer, reshape", {"inputs": [tensor("INPUT0", [*range(8)], [2, 2, 2], "INT64")]}, model("reshaped")),
    infer(
        "infer, the shape behind reshape",
        {"inputs": [tensor("INPUT0", [*range(4)], [1, 4], "INT64")]},
        model("reshaped"),
    ),
    infer("infer, optional input given", {"inputs": [*GOOD, tensor("BIAS", [10])]}, model("optional")),
    infer("infer, optional input left out", {"inputs": GOOD}, model("optional")),
    infer("infer, input missing beside optional", {"inputs": GOOD[:1]}, model("optional")),
    infer(
        "infer, warm-up ran before",
        {"inputs": [tensor("INPUT0", [1, 2], [1, 2]), text("WORD", "w", (1, 1))]},
        model("warm"),
    ),
    infer("infer, versions: highest", {"inputs": [text("INPUT0", "")]}, model("some_versions")),
    infer("infer, versions: named", {"inputs": [text("INPUT0", "")]}, "/v2/models/some_versions/versions/1/infer"),
    infer(
        "infer, versions: not in the policy",
        {"inputs": [text("INPUT0", "")]},
        "/v2/models/latest_versions/versions/1/infer",
    ),
    infer(
        "infer, versions: latest two", {"inputs": [text("INPUT0", "")]}, "/v2/models/latest_versions/versions/2/infer"
    ),
    infer("infer, versions: highest is a number", {"inputs": [text("INPUT0", "")]}, model("latest_versions")),
]

_RANGES = {"UINT8": [0, 255], "UINT16": [0, 65535], "UINT32": [0, 2**32 - 1], "UINT64": [0, 2**64 - 1]}
_RANGES |= {f"INT{bits}": [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] for bits in (8, 16, 32, 64)}
_FLOATS = {"FP32": [0.1, -2.5e-8], "FP64": [0.1, 1e300]}


def typed(datatype: str, data: list[Any], what: str = "") -> Case:
    return infer(
        f"infer, {datatype}{what}", {"inputs": [tensor(f"IN_{datatype}", data, datatype=datatype)]}, model("dtypes")
    )


def halves(name: str, body: dict[str, Any]) -> Case:
    return binary(
        name, {"inputs": [sized("IN_FP16", 4, (2,), "FP16")], **body}, struct.pack("<2e", 1.5, -2), model("dtypes")
    )


DATATYPES = [
    *(typed(datatype, data) for datatype, data in (_RANGES | _FLOATS).items()),
    *(typed(datatype, [data[1] + 1, 0], ", too large") for datatype, data in _RANGES.items()),
    typed("INT32", [1.5, 2], ", a fraction"),
    typed("INT32", [2.0, 2], ", a float that is whole"),
    binary(
        "infer, floats that are not numbers",
        {"inputs": [sized("IN_FP32", 12, (3,))]},
        struct.pack("<3f", float("nan"), float("inf"), -float("inf")),
        model("dtypes"),
    ),
    typed("BOOL", [True, False]),
    typed("BOOL", [1, 0], ", integers"),
    typed("FP16", [1.5, 2], ", JSON"),
    halves("infer, FP16", {"outputs": outputs("OUT_FP16", binary_data=True)}),
    halves("infer, FP16 to JSON", {}),
    binary(
        "infer, STRING as BYTES",
        {"inputs": [sized("IN_STRING", 9, (2,), "BYTES")]},
        b"\2\0\0\0ab\1\0\0\0"[:9] + b"",
        model("dtypes"),
    ),
    infer("infer, a name of no datatype", {"inputs": [tensor("INPUT0", datatype="FLOAT"), GOOD[1]]}),
    infer("infer, another datatype", {"inputs": [tensor("INPUT0", [1, 2, 3, 4], datatype="INT32"), GOOD[1]]}),
]

BINARY = [
    binary("binary, both inputs", {"inputs": PAIR}, FOUR * 2),
    binary("binary, both ways", {"inputs": PAIR, "parameters": {"binary_data_output": True}}, FOUR * 2),
    binary(
        "binary, one output",
        {"inputs": PAIR, "outputs": [*outputs("OUTPUT0", binary_data=True), {"name": "OUTPUT1"}]},
        FOUR * 2,
    ),
    binary(
        "binary, all but one",
        {
            "inputs": PAIR,
            "parameters": {"binary_data_output": True},
            "outputs": [{"name": "OUTPUT0"}, *outputs("OUTPUT1", binary_data=False)],
        },
        FOUR * 2,
    ),
    binary("binary, beside JSON", {"inputs": [PAIR[0], GOOD[1]]}, FOUR),
    binary(
        "binary, strings",
        {"inputs": [sized("INPUT0", 11, (2,), "BYTES")], "parameters": {"binary_data_output": True}},
        b"\x03\0\0\0\xff\0a\0\0\0\0",
        model("strings"),
    ),
    binary(
        "binary, strings that are not text to JSON",
        {"inputs": [sized("INPUT0", 6, (1,), "BYTES")]},
        b"\2\0\0\0\xff\xfe",
        model("strings"),
    ),
    infer("binary, of JSON", {"inputs": GOOD, "outputs": outputs("OUTPUT0", binary_data=True)}),
    Http("raw binary", "POST", model("strings"), b"\2\0\0\0ab", {"Inference-Header-Content-Length": "0"}).case(),
    Http(
        "raw binary, batch",
        "POST",
        model("classes"),
        struct.pack("<5f", *range(5)),
        {"Inference-Header-Content-Length": "0"},
    ).case(),
    Http(
        "raw binary, variable dimensions",
        "POST",
        model("wildcard"),
        struct.pack("<6i", *range(6)),
        {"Inference-Header-Content-Length": "0"},
    ).case(),
    Http("raw binary, too short", "POST", model("classes"), bytes(4), {"Inference-Header-Content-Length": "0"}).case(),
    Http("raw binary, two inputs", "POST", ADD, FOUR, {"Inference-Header-Content-Length": "0"}).case(),
]

PARAMETERS = [
    infer(
        "parameters, seen by the model",
        {
            "id": "7",
            "inputs": [text("INPUT0", "a")],
            "parameters": {"b": True, "i": -3, "s": "x", "d": 1.5},
            "outputs": outputs("SEEN"),
        },
        model("echo"),
    ),
    infer(
        "parameters, sequence and schedule",
        {
            "inputs": [],
            "parameters": {
                "sequence_id": 42,
                "sequence_start": True,
                "sequence_end": True,
                "priority": 3,
                "timeout": 5000000,
            },
            "outputs": outputs("SEEN"),
        },
        model("echo"),
    ),
    infer(
        "parameters, sequence of a string",
        {"inputs": [], "parameters": {"sequence_id": "dialog", "sequence_start": True}, "outputs": outputs("SEEN")},
        model("echo"),
    ),
    infer(
        "parameters, sequence id of 129 letters",
        {"inputs": [], "parameters": {"sequence_id": "x" * 129}, "outputs": outputs("SEEN")},
        model("echo"),
    ),
    infer("parameters, empty", {"inputs": [], "parameters": {}, "outputs": outputs("SEEN")}, model("echo")),
    infer("parameters, reserved", {"inputs": GOOD, "parameters": {"triton_x": 1}}),
    infer("parameters, an object", {"inputs": GOOD, "parameters": {"a": {"b": 1}}}),
    infer("parameters, an array", {"inputs": GOOD, "parameters": {"a": [1]}}),
    infer("parameters, null", {"inputs": GOOD, "parameters": {"a": None}}),
    infer("parameters, timeout is text", {"inputs": GOOD, "parameters": {"timeout": "soon"}}),
    infer("parameters, priority is negative", {"inputs": GOOD, "parameters": {"priority": -1}}),
    infer("parameters, sequence_start is a number", {"inputs": GOOD, "parameters": {"sequence_start": 1}}),
    infer("parameters, no inputs", {"inputs": [], "outputs": outputs("SEEN", "OTHER")}, model("echo")),
]

PARAMETERS += [
    infer(
        "parameters, from headers",
        {"inputs": [], "outputs": outputs("SEEN")},
        model("echo"),
        X_Seen="yes",
        X_Other="no",
    ),
    infer(
        "parameters, header and body",
        {"inputs": [], "parameters": {"x-seen": 5}, "outputs": outputs("SEEN")},
        model("echo"),
        X_Seen="yes",
    ),
    infer(
        "parameters, a reserved header", {"inputs": [], "outputs": outputs("SEEN")}, model("echo"), Triton_Seen="yes"
    ),
]

CLASSES = [
    infer("classification", FIVE | {"outputs": outputs("OUTPUT0", classification=3)}, model("classes")),
    infer(
        "classification, binary",
        FIVE | {"outputs": outputs("OUTPUT0", classification=1, binary_data=True)},
        model("classes"),
    ),
    infer(
        "classification, more than there are",
        FIVE | {"outputs": outputs("OUTPUT0", classification=9)},
        model("classes"),
    ),
    infer("classification, zero", FIVE | {"outputs": outputs("OUTPUT0", classification=0)}, model("classes")),
    infer("classification, no labels", {"inputs": GOOD, "outputs": outputs("OUTPUT0", classification=2)}),
    infer(
        "classification, of integers",
        {"inputs": [tensor("INPUT0", [5, -1, 9], [1, 1, 3], "INT32")], "outputs": outputs("OUTPUT0", classification=2)},
        model("wildcard"),
    ),
]

_PLAIN = json.dumps({"inputs": GOOD}).encode()
COMPRESSION = [
    infer("compression, gzip", gzip.compress(_PLAIN), Content_Encoding="gzip"),
    infer("compression, deflate", zlib.compress(_PLAIN), Content_Encoding="deflate"),
    infer("compression, identity", _PLAIN, Content_Encoding="identity"),
    infer(
        "compression, of a large answer",
        {"inputs": [tensor("INPUT0", ["x" * 100] * 100, datatype="BYTES")]},
        model("strings"),
        Accept_Encoding="gzip",
    ),
    infer("compression, unknown", _PLAIN, Content_Encoding="br"),
    infer("compression, garbage", _PLAIN, Content_Encoding="gzip"),
    infer("compression, cut off", gzip.compress(_PLAIN)[:-9], Content_Encoding="gzip"),
    infer("compression, of the answer: gzip", _PLAIN, Accept_Encoding="gzip"),
    infer("compression, of the answer: deflate", _PLAIN, Accept_Encoding="deflate"),
    infer("compression, of the answer: both", _PLAIN, Accept_Encoding="gzip, deflate"),
    infer("compression, of the answer: qualities", _PLAIN, Accept_Encoding="gzip;q=0.5, deflate;q=1"),
    infer("compression, of the answer: unknown", _PLAIN, Accept_Encoding="br"),
    infer("compression, of the answer: anything", _PLAIN, Accept_Encoding="*"),
]


def failing(code: str) -> Case:
    return infer(f"model's error: {code}", {"inputs": [text("CODE", code, (1, 1))]}, model("errors"))


CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")
RAISED = ("raise SystemExit", "raise KeyboardInterrupt", "raise CancelledError")
WAYS = ("plain", "raise", "unknown output", "wrong type", "wrong shape", "no outputs", "stub", *RAISED)

ERRORS = [
    *(failing(code) for code in (*CODES, *WAYS)),
    infer(
        "model's error: unknown output, another is asked for",
        {"inputs": [text("CODE", "unknown output", (1, 1))], "outputs": outputs("OUTPUT0")},
        model("errors"),
    ),
    infer("error, input missing", {"inputs": GOOD[:1]}),
    infer("error, input missing, id", {"id": "7", "inputs": GOOD[:1]}),
    infer("error, input unknown", {"inputs": [*GOOD, tensor("NOPE")]}),
    infer("error, input unknown in place of another", {"inputs": [GOOD[0], tensor("NOPE")]}),
    infer("error, input twice", {"inputs": [*GOOD, GOOD[0]]}),
    infer("error, shape", {"id": "7", "inputs": [GOOD[0], tensor("INPUT1", [1, 2])]}),
    infer("error, output unknown", {"inputs": GOOD, "outputs": outputs("NOPE")}),
    infer("error, output twice", {"inputs": GOOD, "outputs": outputs("OUTPUT0", "OUTPUT0")}),
    infer("error, model unknown", {"inputs": GOOD}, model("nowhere")),
    infer("error, model failed to load", {"inputs": GOOD}, model("broken")),
    infer("error, model's configuration is broken", {"inputs": GOOD}, model("misconfigured")),
    infer("error, version unknown", {"inputs": GOOD}, "/v2/models/add_sub/versions/9/infer"),
    infer("error, version is no number", {"inputs": GOOD}, "/v2/models/add_sub/versions/x/infer"),
    infer("error, version zero", {"inputs": GOOD}, "/v2/models/add_sub/versions/0/infer"),
    infer("error, version too large", {"inputs": GOOD}, f"/v2/models/add_sub/versions/{2**70}/infer"),
    infer("error, version 01", {"inputs": GOOD}, "/v2/models/add_sub/versions/01/infer"),
    infer("error, decoupled", {"inputs": [tensor("N", [1], datatype="INT32")]}, model("repeat")),
    infer(
        "error, shared memory unknown",
        {
            "inputs": [
                {
                    "name": "INPUT0",
                    "shape": [4],
                    "datatype": "FP32",
                    "parameters": {"shared_memory_region": "zz", "shared_memory_byte_size": 16},
                },
                GOOD[1],
            ]
        },
    ),
]

CASES = [*TENSORS, *DATATYPES, *BINARY, *PARAMETERS, *CLASSES, *COMPRESSION, *ERRORS]
