"""generate and generate_stream: tensors of JSON, frames, errors before and behind the first response."""

from __future__ import annotations

from typing import Any

from differential.observe import Case, Http


def generate(name: str, model: str, body: Any, stream: bool = False) -> Case:
    path = f"/v2/models/{model}/generate{'_stream' if stream else ''}"
    return Http(f"{'generate_stream' if stream else 'generate'}: {name}", "POST", path, body).case()


def both(name: str, model: str, body: Any) -> list[Case]:
    return [generate(name, model, body), generate(name, model, body, stream=True)]


ROW = {"INPUT0": [1, 2, 3, 4], "INPUT1": [4, 3, 2, 1.5]}

CASES = [
    *both("tensors", "add_sub", ROW),
    *both("a batch dimension", "batched", ROW),
    *both("id", "add_sub", ROW | {"id": "7"}),
    *both("one response", "repeat", {"N": 1, "TEXT": 'a "b" é'}),
    *both("no response", "repeat", {"N": 0}),
    *both("three responses", "repeat", {"N": 3, "id": "9"}),
    *both("an error first", "repeat", {"N": 2, "FAIL_AT": 0}),
    *both("an error later", "repeat", {"N": 3, "FAIL_AT": 1}),
    *both("an error of the model", "errors", {"CODE": "NOT_FOUND"}),
    *both("an unknown model", "nowhere", {}),
    *both("a missing input", "add_sub", {"INPUT0": [1, 2, 3, 4]}),
    *both("not JSON", "add_sub", b"{"),
    *both("an array", "add_sub", []),
    *both("empty", "add_sub", b""),
    generate("an unknown version", "add_sub/versions/9", ROW),
    generate("a version", "add_sub/versions/1", ROW),
    generate("parameters", "echo", {"INPUT0": "x", "b": True, "i": 3, "d": 0.5, "s": "t"}),
    generate("nested parameters", "echo", {"INPUT0": "x", "parameters": {"b": True, "i": 3}}),
    generate("nested tensors", "echo", {"parameters": {"INPUT0": "x"}}),
    generate("a parameter that is an array", "echo", {"INPUT0": "x", "more": [1]}),
    generate("a parameter that is an object", "echo", {"INPUT0": "x", "more": {}}),
    generate("a parameter that is null", "echo", {"INPUT0": "x", "more": None}),
    generate("a reserved parameter", "echo", {"INPUT0": "x", "triton_x": 1}),
    generate("scalar for one element", "strings", {"INPUT0": "x"}),
    generate("several elements", "strings", {"INPUT0": ["x", "y", ""]}),
    generate("no elements", "strings", {"INPUT0": []}),
    generate("a shape that is found", "wildcard", {"INPUT0": [*range(6)]}),
    generate("a shape that is not", "wildcard", {"INPUT0": [*range(5)]}),
    generate("too few elements", "add_sub", ROW | {"INPUT0": [1, 2]}),
    generate("nested arrays", "add_sub", ROW | {"INPUT0": [[1, 2], [3, 4]]}),
    generate("another type", "add_sub", ROW | {"INPUT0": ["1", "2", "3", "4"]}),
    generate("an object for a tensor", "add_sub", ROW | {"INPUT0": {}}),
    generate("null for a tensor", "add_sub", ROW | {"INPUT0": None}),
    generate(
        "all datatypes",
        "dtypes",
        {"IN_BOOL": True, "IN_UINT64": 2**64 - 1, "IN_INT8": -128, "IN_FP64": 0.1, "IN_STRING": "s"},
    ),
    Http("generate: compressed", "POST", "/v2/models/add_sub/generate", ROW, {"Content-Encoding": "gzip"}).case(),
    Http("generate: a header", "POST", "/v2/models/echo/generate", {"INPUT0": "x"}, {"X-Seen": "yes"}).case(),
    generate("id is a number", "add_sub", ROW | {"id": 7}),
]
