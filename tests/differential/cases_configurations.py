"""Configurations that leave tensors out, warm-ups of sequences, and what load requests bring."""

from __future__ import annotations

import base64
import json
from typing import Any

from differential.cases_http import GOOD, infer, model, outputs, tensor, text
from differential.cases_models import load, post, unload, wait_until
from differential.observe import Case, Http, call, client, infer_request
from differential.peers import MODELS, Peer

NO_TENSORS = ("no_inputs", "no_inputs_batched", "no_outputs")
NOTHING: dict[str, Any] = {"inputs": []}
ONE = {"inputs": [text("INPUT0", "one", (1, 1))]}
MORE = {"inputs": [text("INPUT0", "more", (1, 1))]}


def generate(name: str, model: str, body: Any) -> Case:
    return Http(name, "POST", f"/v2/models/{model}/generate", body).case()


TENSORS = [
    *(Http(f"GET /v2/models/{name}", "GET", f"/v2/models/{name}").case() for name in NO_TENSORS),
    Http("GET /v2/models/no_inputs/config", "GET", "/v2/models/no_inputs/config", exact=False).case(),
    infer("no inputs", NOTHING, model("no_inputs")),
    infer("no inputs, an output asked", NOTHING | {"outputs": outputs("OUTPUT0")}, model("no_inputs")),
    infer("no inputs, binary", NOTHING | {"outputs": outputs("OUTPUT0", binary_data=True)}, model("no_inputs")),
    infer("no inputs, and one comes", {"inputs": GOOD[:1]}, model("no_inputs")),
    infer("no inputs, in batches", NOTHING, model("no_inputs_batched")),
    infer("no outputs", ONE, model("no_outputs")),
    infer("no outputs, and the model gives one", MORE, model("no_outputs")),
    infer("no outputs, and one is asked for", ONE | {"outputs": outputs("OUTPUT0")}, model("no_outputs")),
    infer("no outputs, no input", NOTHING, model("no_outputs")),
    generate("generate: no inputs", "no_inputs", {}),
    generate("generate: no outputs", "no_outputs", {"INPUT0": "one"}),
    Case("grpc: infer, no inputs", lambda peer: call(peer, "ModelInfer", infer_request("no_inputs"))),
    Case(
        "grpc: infer, no outputs",
        lambda peer: call(peer, "ModelInfer", infer_request("no_outputs", ("INPUT0", "BYTES", [1, 1], b"\3\0\0\0one"))),
    ),
    infer(
        "warm-up of sequences",
        {
            "inputs": [tensor("INPUT0", [1], [1, 1], "INT32")],
            "parameters": {"sequence_id": 1, "sequence_start": True, "sequence_end": True},
        },
        model("warm_sequence"),
    ),
]
NULLS = [
    infer("null: parameters of an input", {"inputs": [GOOD[0] | {"parameters": None}, GOOD[1]]}),
    infer("null: parameters of an output", {"inputs": GOOD, "outputs": [{"name": "OUTPUT0", "parameters": None}]}),
    *(infer(f"null: {name}", {"inputs": GOOD, name: None}) for name in ("id", "parameters", "outputs")),
    infer("null: a member that is not known", {"inputs": GOOD, "more": None}),
    Case("http: null: a load and an unload", lambda peer: null_bodies(peer)),
]


def null_bodies(peer: Peer) -> Any:
    paths = [f"/v2/repository/models/add_sub/{verb}" for verb in ("load", "unload", "load")]
    return [client(peer).post(path, content=b"null").status_code for path in paths]


def sent(code: bytes | str) -> str:
    return base64.b64encode(code.encode() if isinstance(code, str) else code).decode()


WARM = (MODELS / "warm/1/model.py").read_bytes()


def some_fields(peer: Peer) -> Any:
    """The file on disk does not count beside a request's configuration, however little that says."""
    output = {"name": "O", "data_type": "TYPE_FP32", "dims": [1]}
    said: list[dict[str, Any]] = [
        {},
        {"max_batch_size": 2, "backend": None},
        {"parameters": {"k": {"string_value": "v"}}},
        {"output": [output]},
    ]
    seen = []
    for config in said:
        loaded = load(peer, "managed", config=json.dumps(config))
        seen += [loaded, client(peer).get("/v2/models/managed/config").json()]
    return [*seen, load(peer, "managed"), client(peer).get("/v2/models/managed").json()]


def any_file(peer: Peer) -> Any:
    """Labels, data of warm-ups, and files that nobody reads."""
    config = {
        "backend": "python",
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [2]}, _word()],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [1], "label_filename": "l/labels.txt"}],
        "max_batch_size": 4,
        "model_warmup": [
            {"name": "w", "batch_size": 1, "inputs": {"INPUT0": _file([2]), "WORD": _file([1], "STRING")}}
        ],
    }
    files = {
        "1/model.py": WARM,
        "l/labels.txt": b"none\ncat\ndog\n",
        "warmup/INPUT0": bytes(8),
        "warmup/WORD": bytes(4),
    }
    files |= {"config.pbtxt": b"nonsense", "notes/read me.md": b"", "0/x": b"", ".hidden": b"", "/notes/slash": b""}
    body = {
        "inputs": [tensor("INPUT0", [1, 2], [1, 2]), text("WORD", "w", (1, 1))],
        "outputs": outputs("OUTPUT0", classification=1),
    }
    brought = {f"file:{path}": sent(data) for path, data in files.items()}
    said = json.dumps(config)
    steps = [load(peer, "brought", config=said, **brought), post(peer, model("brought"), body)]
    steps += [
        load(peer, "brought", config=said, **brought | {f"file:{path}": sent("x")})
        for path in ("../x", "1/../../x", "d/", "", "1/model.py/x")
    ]
    steps += [post(peer, model("brought"), body), unload(peer, "brought")]
    wait_until(lambda: client(peer).get("/v2/models/brought/ready").status_code == 400)
    return [*steps, load(peer, "brought")]


def _word() -> dict[str, Any]:
    return {"name": "WORD", "data_type": "TYPE_STRING", "dims": [1]}


def _file(dims: list[int], datatype: str = "FP32") -> dict[str, Any]:
    name = "WORD" if datatype == "STRING" else "INPUT0"
    return {"data_type": f"TYPE_{datatype}", "dims": dims, "input_data_file": name}


REPOSITORY = [
    Case("repository: some fields of a configuration", some_fields),
    Case("repository: any file", any_file),
]
CASES = [*TENSORS, *NULLS, *REPOSITORY]
