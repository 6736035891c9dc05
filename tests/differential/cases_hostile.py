"""Requests that nobody sends by accident. What Triton refuses, we refuse: as the caller's fault, and with a text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from differential.cases_http import ADD, FOUR, GOOD, PAIR, binary, infer, model, sized, tensor
from differential.observe import Case
from differential.peers import Peer


def data(name: str, text: str) -> Case:
    """INPUT0's data as it stands here."""
    body = json.dumps({"inputs": [tensor("INPUT0", "DATA", [4]), GOOD[1]]}).replace('"DATA"', text)
    return infer(f"hostile, data: {name}", body.encode())


def with_input(what: str, **changes: Any) -> Case:
    changed = {key: value for key, value in (GOOD[0] | changes).items() if value is not None}
    return infer(f"hostile, input: {what}", {"inputs": [changed, GOOD[1]]})


def body(name: str, content: Any) -> Case:
    return infer(f"hostile, body: {name}", content)


BODIES = [
    body("empty", b""),
    body("not JSON", b"{"),
    body("more behind it", b'{"inputs":[]} x'),
    body("an array", []),
    body("null", b"null"),
    body("not UTF-8", b'{"inputs":"\xff"}'),
    body("no inputs", {}),
    body("inputs is an object", {"inputs": {}}),
    body("inputs holds numbers", {"inputs": [1]}),
    body("outputs is an object", {"inputs": GOOD, "outputs": {}}),
    body("outputs holds text", {"inputs": GOOD, "outputs": ["OUTPUT0"]}),
    body("output without a name", {"inputs": GOOD, "outputs": [{}]}),
    body("id is a number", {"id": 5, "inputs": GOOD}),
    body("parameters is an array", {"inputs": GOOD, "parameters": []}),
    body("binary_data_output is a number", {"inputs": GOOD, "parameters": {"binary_data_output": 1}}),
    body(
        "classification is negative",
        {"inputs": GOOD, "outputs": [{"name": "OUTPUT0", "parameters": {"classification": -1}}]},
    ),
    body(
        "classification is text",
        {"inputs": GOOD, "outputs": [{"name": "OUTPUT0", "parameters": {"classification": "1"}}]},
    ),
]
INPUTS = [
    with_input("no name", name=None),
    with_input("no shape", shape=None),
    with_input("no datatype", datatype=None),
    with_input("no data", data=None),
    with_input("name is a number", name=1),
    with_input("shape is a number", shape=4),
    with_input("shape holds text", shape=["4"]),
    with_input("shape holds a fraction", shape=[4.0]),
    with_input("shape is negative", shape=[-4]),
    with_input("shape is zero", shape=[0], data=[]),
    with_input("shape overflows", shape=[2**32, 2**32, 4]),
    with_input("shape is empty", shape=[]),
    with_input("datatype is lower case", datatype="fp32"),
    with_input("parameters is text", parameters="x"),
    with_input("shared memory without a size", parameters={"shared_memory_region": "zz"}),
    with_input(
        "shared memory region is a number", parameters={"shared_memory_region": 1, "shared_memory_byte_size": 16}
    ),
]
DATA = [
    data("too few", "[1,2]"),
    data("too many", "[1,2,3,4,5]"),
    data("a scalar", "5"),
    data("an object", "{}"),
    data("text", '["1","2","3","4"]'),
    data("booleans", "[true,true,true,true]"),
    data("null", "[null,1,2,3]"),
    data("not a number", "[NaN,1,2,Infinity]"),
    data("beyond float", "[1e39,1,2,-1e39]"),
    data("beyond double", "[1e999,1,2,3]"),
    data("nested too deep", "[" * 5000 + "1" + "]" * 5000),
    data("ragged", "[[1,2],[3],4]"),
]
_HEADER = len(json.dumps({"inputs": PAIR}))
BINARY = [
    *(
        binary(f"hostile, binary: header length {length!r}", {"inputs": PAIR}, FOUR * 2, length=length)
        for length in ("99999", "-5", "x", "1e3", f"+{_HEADER}", f"{_HEADER - 1}", "18446744073709551616")
    ),
    binary("hostile, binary: more than named", {"inputs": PAIR}, FOUR * 2 + b"xx"),
    binary("hostile, binary: less than named", {"inputs": PAIR}, (FOUR * 2)[:-3]),
    binary("hostile, binary: size of another shape", {"inputs": [sized("INPUT0", 12), PAIR[1]]}, FOUR * 2),
    binary("hostile, binary: negative size", {"inputs": [sized("INPUT0", -16), PAIR[1]]}, FOUR * 2),
    binary("hostile, binary: enormous size", {"inputs": [sized("INPUT0", 2**63), PAIR[1]]}, FOUR * 2),
    binary("hostile, binary: beside data", {"inputs": [PAIR[0] | {"data": [1, 2, 3, 4]}, PAIR[1]]}, FOUR * 2),
    infer("hostile, binary: no header", json.dumps({"inputs": PAIR}).encode() + FOUR * 2, ADD),
    *(
        binary(
            f"hostile, binary: {name}",
            {"inputs": [sized("INPUT0", len(content), (2,), "BYTES")]},
            content,
            model("strings"),
        )
        for name, content in (
            ("a string longer than the rest", b"\xff\xff\xff\x7fab"),
            ("a string too few", b"\1\0\0\0a"),
            ("a string too many", b"\0\0\0\0" * 3),
            ("half a length", b"\1\0\0\0a\1\0"),
        )
    ),
]
DEADLY = [
    with_input("shape is enormous", shape=[2**62]),
    infer("hostile, input: enormous", {"inputs": [tensor("INPUT0", [1], [1, 2**40, 3], "INT32")]}, model("wildcard")),
    infer(
        "hostile, classes of strings",
        {
            "inputs": [tensor("INPUT0", ["a"], [1], "BYTES")],
            "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}],
        },
        model("strings"),
    ),
]
"""These end Triton's process. We refuse them."""


def outcome(case: Case) -> Case:
    """Whether it was refused. A 500 of ours is no refusal, Triton's often are."""

    def run(peer: Peer) -> Any:
        seen = case.run(peer)
        if seen["status"] == 200:
            return seen
        refused = seen["status"] < 500 or peer.name == "triton"
        return {"refused": (refused and len(seen["body"]["error"]) > 10) or seen}

    return replace(case, run=run)


CASES = [outcome(case) for case in (*BODIES, *INPUTS, *DATA, *BINARY)]
REFUSED = [outcome(case) for case in DEADLY]
