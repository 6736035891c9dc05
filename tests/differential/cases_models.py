"""What needs several requests at a time or in turn: models that call models, queues, loading and unloading, counts."""

from __future__ import annotations

import base64
import json
import re
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from differential.cases_http import GOOD, model, outputs, tensor, text
from differential.observe import Case, call, client, infer_request, shown
from differential.peers import MODELS, Peer

CALLS = (
    "plain",
    "version",
    "unknown",
    "unknown_version",
    "wrong",
    "failing",
    "concurrent",
    "told",
    "sequence",
    "cached",
    "bytes_names",
)
ITERATORS = ("again", "resumed", "next", "plain_again", "unknown_again", "awaited", "given_up")
DECOUPLED = (
    "decoupled",
    "decoupled_none",
    "decoupled_failing",
    "decoupled_unary",
    "decoupled_ensemble",
    "ready",
    *ITERATORS,
)
UTILITIES = ("arguments", "config", "helpers", "tensors", "metrics", "refusals")


def post(peer: Peer, path: str, body: Any = None) -> dict[str, Any]:
    return shown(client(peer).post(path, json={} if body is None else body), exact=False)


def bls(what: str) -> Case:
    return Case(f"model calls models: {what}", lambda peer: post(peer, model("bls"), {"inputs": [text("WHAT", what)]}))


class Queue:
    """Requests to a model that holds each one until its gate is opened."""

    def __init__(self, peer: Peer, name: str) -> None:
        self._peer = peer
        self._model = name
        self._gate = peer.folder / f"gate-{uuid.uuid4().hex}"
        self._pool = ThreadPoolExecutor(4)
        self._sent: list[Any] = []

    def send(self, label: str, **parameters: Any) -> None:
        body = {
            "inputs": [text("INPUT0", self.name(label), (1, 1))],
            "parameters": parameters,
            "outputs": outputs("OUTPUT0"),
        }
        self._sent.append(self._pool.submit(post, self._peer, model(self._model), body))

    def name(self, label: str) -> str:
        """A request's input."""
        return f"{self._gate}|{label}"

    def running(self) -> None:
        """The first one is in the model."""
        wait_until(lambda: self._order.exists())

    def waiting(self, count: int) -> None:
        """This many are in the queue."""
        wait_until(lambda: self._pending() == count)

    def all_there(self) -> None:
        """The first one is in the model, and each of the others is in the queue or has its answer."""
        wait_until(lambda: self._pending() + sum(each.done() for each in self._sent) == len(self._sent) - 1)

    def _pending(self) -> int:
        pattern = rf'nv_inference_pending_request_count{{model="{self._model}",version="1"}} (\d+)'
        [count] = re.findall(pattern, client(self._peer).get(self._peer.metrics).text)
        return int(count)

    def open(self) -> dict[str, Any]:
        """Lets all of them go; in which order they ran, and what each got."""
        self._gate.touch()
        answers = [future.result() for future in self._sent]
        return {"order": self._order.read_text(), "answers": [_short(answer) for answer in answers]}

    @property
    def _order(self) -> Path:
        return self._gate.with_name(self._gate.name + ".order")


def _short(answer: dict[str, Any]) -> Any:
    return answer if answer["status"] != 200 else 200


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not come about in time")
        time.sleep(0.01)


def queue_full(peer: Peer) -> Any:
    queue = Queue(peer, "queue_reject")
    queue.send("a")
    queue.running()
    for waiting, label in enumerate("bc", 1):
        queue.send(label)
        queue.waiting(waiting)
    body = {"inputs": [text("INPUT0", "|d", (1, 1))]}
    return [post(peer, model("queue_reject"), body), queue.open()]


def queue_priority(peer: Peer) -> Any:
    queue = Queue(peer, "queue_reject")
    queue.send("a")
    queue.running()
    queue.send("b")
    queue.waiting(1)
    queue.send("c", priority=1)
    queue.waiting(2)
    return queue.open()


def priority_unknown(peer: Peer) -> Any:
    queue = Queue(peer, "queue_reject")
    queue.send("a", priority=9)
    return queue.open()


def timed_out(name: str, **parameters: int) -> Callable[[Peer], Any]:
    """The second has less time than it waits; the third has enough."""

    def run(peer: Peer) -> Any:
        queue = Queue(peer, name)
        queue.send("a")
        queue.running()
        queue.send("b", timeout=1000, **parameters)
        queue.all_there()
        time.sleep(0.01)
        queue.send("c")
        queue.all_there()
        return queue.open()

    return run


def left(peer: Peer) -> Any:
    """A caller whose deadline passes while its request waits: the request is never executed."""
    queue = Queue(peer, "queue_delay")
    queue.send("a")
    queue.running()
    label = queue.name("b").encode()
    request = infer_request("queue_delay", ("INPUT0", "BYTES", [1, 1], len(label).to_bytes(4, "little") + label))
    answer = call(peer, "ModelInfer", request, seconds=0.3)
    del answer["details"]  # the client's own words or the server's, whichever looks at the clock first
    first = queue.open()
    queue.send("c")  # it would come behind the one that left
    return [answer, first["answers"], queue.open()]


QUEUES = [
    Case("queue: a caller that leaves", left),
    Case("queue: full", queue_full),
    Case("queue: priorities", queue_priority),
    Case("queue: a priority that is no level", priority_unknown),
    Case("queue: timeout, rejected", timed_out("queue_reject")),
    Case("queue: timeout, delayed", timed_out("queue_delay")),
    Case("queue: timeout where the model has none", timed_out("queue_reject", priority=1)),
]


def index(peer: Peer, ready: bool = False) -> Any:
    found = post(peer, "/v2/repository/index", {"ready": ready})["body"]
    return sorted(found, key=lambda entry: (entry["name"], entry.get("version", "")))


def state(peer: Peer, name: str) -> Any:
    return [entry for entry in index(peer) if entry["name"] == name]


def load(peer: Peer, name: str, **parameters: Any) -> Any:
    return post(peer, f"/v2/repository/models/{name}/load", {"parameters": parameters} if parameters else {})


def unload(peer: Peer, name: str, **parameters: Any) -> Any:
    return post(peer, f"/v2/repository/models/{name}/unload", {"parameters": parameters} if parameters else {})


def infer(peer: Peer, name: str = "managed") -> Any:
    rows = [tensor(f"INPUT{i}", [1, 2, 3, 4], [1, 4]) for i in (0, 1)]
    return post(peer, model(name), {"inputs": rows})


def unload_and_load(peer: Peer) -> Any:
    steps: list[Any] = [infer(peer), unload(peer, "managed")]
    wait_until(lambda: state(peer, "managed")[0].get("state") == "UNAVAILABLE")
    steps += [state(peer, "managed"), infer(peer), unload(peer, "managed")]
    steps += [client(peer).get("/v2/models/managed/ready").status_code]
    return [*steps, load(peer, "managed"), state(peer, "managed"), infer(peer), load(peer, "managed")]


def override(peer: Peer) -> Any:
    """Another configuration, another file, and back to the repository's own."""
    config = {"backend": "python", "max_batch_size": 2}
    config |= {"input": [{"name": "INPUT0", "data_type": "TYPE_STRING", "dims": [-1]}]}
    config |= {"output": [{"name": "OUTPUT0", "data_type": "TYPE_STRING", "dims": [1]}]}
    config |= {"parameters": {"label": {"string_value": "sent"}}}
    content = base64.b64encode((MODELS / "some_versions/1/model.py").read_bytes()).decode()
    files = {"file:7/model.py": content}
    ask = {"inputs": [text("INPUT0", "", (1, 1))]}
    limited = load(peer, "managed", config=json.dumps({"max_batch_size": 1, **_managed()}))
    return [
        limited,
        client(peer).get("/v2/models/managed/config").json()["max_batch_size"],
        load(peer, "managed", config=json.dumps(config | {"max_batch_size": 0}), **files),
        _settled(peer, "managed"),
        post(peer, model("managed"), {"inputs": [text("INPUT0", "")]}),
        post(peer, model("managed"), ask),
        load(peer, "managed"),
        infer(peer),
    ]


def loose_json(peer: Peer) -> Any:
    """Which configurations are taken though they are not quite JSON, and which are not."""
    plain = json.dumps({"max_batch_size": 8, **_managed()})
    loose = [plain.replace('"backend":', "backend :"), plain.replace('"', "'"), plain[:-1] + ", }"]
    wrong = [
        plain + " x",
        plain[:-1] + " /* all */ }",
        plain.replace(", ", " ", 1),
        plain.replace('"python"', "python"),
    ]
    taken = [load(peer, "managed", config=config)["status"] == 200 for config in (*loose, *wrong)]
    return [*taken, load(peer, "managed"), infer(peer)]


def _settled(peer: Peer, name: str) -> Any:
    wait_until(lambda: all(entry.get("state") != "UNLOADING" for entry in state(peer, name)))
    return state(peer, name)


def _managed() -> dict[str, Any]:
    tensors = [{"data_type": "TYPE_FP32", "dims": [4]}] * 2
    return {
        "backend": "python",
        "input": [{"name": f"INPUT{i}", **t} for i, t in enumerate(tensors)],
        "output": [{"name": f"OUTPUT{i}", **t} for i, t in enumerate(tensors)],
    }


def bad_loads(peer: Peer) -> Any:
    """Loads that fail leave the loaded model as it is."""
    broken = base64.b64encode(b"raise ValueError('broken when imported')").decode()
    steps = [
        load(peer, "nowhere"),
        unload(peer, "nowhere"),
        load(peer, "managed", config="{"),
        load(peer, "managed", config=5),
        load(peer, "managed", **{"file:1/model.py": broken}),
        load(peer, "managed", config=json.dumps(_managed()), **{"file:1/model.py": "no base64!"}),
        load(peer, "managed", nonsense=True),
        load(peer, "broken"),
        load(peer, "misconfigured"),
        post(peer, "/v2/repository/other/models/managed/load"),
        post(peer, "/v2/repository/other/index"),
        shown(client(peer).post("/v2/repository/models/managed/load", content=b"{")),
        infer(peer),
    ]
    return [_without_paths(step) for step in steps]


def _without_paths(step: dict[str, Any]) -> dict[str, Any]:
    """Temporary folders have names of their own."""
    return json.loads(re.sub(r"/[\w/.-]*/(managed|broken|misconfigured)", r"FOLDER/\1", json.dumps(step)))


def grpc_repository(peer: Peer) -> Any:
    steps = [call(peer, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="managed"))]
    wait_until(lambda: state(peer, "managed")[0].get("state") == "UNAVAILABLE")
    steps += [call(peer, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="managed"))]
    found = call(peer, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
    return [*steps, sorted(found["models"], key=lambda m: (m["name"], m["version"]))]


REPOSITORY = [
    Case("repository: index", index),
    Case("repository: index of what is ready", lambda peer: index(peer, ready=True)),
    Case("repository: unload and load", unload_and_load),
    Case("repository: another configuration and file", override),
    Case("repository: a configuration that is not quite JSON", loose_json),
    Case("repository: loads that fail", bad_loads),
    Case("repository: over gRPC", grpc_repository),
]


def control(name: str, run: Callable[[Peer], Any]) -> Case:
    return Case(f"without control: {name}", run)


UNCONTROLLED = [
    control("load", lambda peer: load(peer, "add_sub")),
    control("unload", lambda peer: unload(peer, "add_sub")),
    control(
        "load over gRPC",
        lambda peer: call(peer, "RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="add_sub")),
    ),
    control(
        "unload over gRPC",
        lambda peer: call(peer, "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="add_sub")),
    ),
    control("index", index),
    control("ready", lambda peer: {"status": client(peer).get("/v2/health/ready").status_code}),
    control("ready over gRPC", lambda peer: call(peer, "ServerReady", pb.ServerReadyRequest())),
    control("infer", lambda peer: post(peer, model("add_sub"), {"inputs": GOOD})),
]
"""For servers that are in control mode none."""

CASES = [*map(bls, (*CALLS, *DECOUPLED, *UTILITIES)), *QUEUES, *REPOSITORY]
