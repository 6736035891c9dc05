"""Statistics and metrics: the same requests make the same counts grow."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from differential.cases_grpc import PAIR
from differential.cases_http import GOOD, model, tensor, text
from differential.cases_models import bls, infer, load, post, queue_full, state, unload, wait_until
from differential.cases_stream import repeat
from differential.observe import Case, call, client, infer_request, stream
from differential.peers import Peer


def statistics(peer: Peer, name: str) -> Any:
    """The counts, without times."""
    found = call(peer, "ModelStatistics", pb.ModelStatisticsRequest(name=name))["model_stats"][0]
    return _counts(found)


def _counts(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _counts(item) for key, item in value.items() if key not in ("ns", "last_inference", "memory_usage")
        }
    return [_counts(item) for item in value] if isinstance(value, list) else value


def minus(after: Any, before: Any) -> Any:
    """What has grown; the rest is left out, as servers leave out what never was."""
    if isinstance(after, dict):
        grown = {key: minus(value, (before or {}).get(key)) for key, value in after.items()}
        return {key: value for key, value in grown.items() if value not in (0, {})}
    if isinstance(after, list):
        return _grown_sizes(after, before or [])
    return int(after) - int(before or 0) if str(after).isdigit() else after


def _grown_sizes(after: list[Any], before: list[Any]) -> list[Any]:
    """Of `batch_stats`: by size, whichever sizes a server has seen before (one that was just started has seen none)."""
    known = {item["batch_size"]: item for item in before}
    grown = [minus(item, {**known.get(item["batch_size"], {}), "batch_size": 0}) for item in after]
    return [counts for counts in grown if counts.keys() != {"batch_size"}]


def counted(name: str, *steps: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    """How much the model's statistics and metrics grow."""

    def run(peer: Peer) -> Any:
        def read() -> tuple[Any, Any]:
            return statistics(peer, name), metrics_of(peer, name)

        before = read()
        for step in steps:
            step(peer)
        after = _settled(read, before)
        return minus(after[0], before[0]), minus(after[1], before[1])

    return run


def _settled(read: Callable[[], Any], before: Any) -> Any:
    """What is read once it has grown and does so no more: Triton counts a stream after its last response is sent."""
    last, deadline = before, time.monotonic() + 2
    while time.monotonic() < deadline:
        now = read()
        if now == last != before:
            break
        last = now
    return last


_SAMPLE = re.compile(r"^(nv_\w+){(.*)} (\S+)$", re.MULTILINE)


def metrics_of(peer: Peer, name: str) -> dict[str, Any]:
    """The samples of one model; of durations only that they are there."""
    found = {}
    for family, labels, value in _SAMPLE.findall(client(peer).get(peer.metrics).text):
        if family.startswith("nv_inference") and "_summary_" not in family and f'model="{name}"' in labels:
            pairs = ",".join(sorted(labels.split(",")))
            found[f"{family} {pairs}"] = "there" if "duration" in family else int(float(value))
    return found


def summaries(name: str, *steps: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    """The model's summaries: how much their counts grow, and which quantiles there are."""

    def run(peer: Peer) -> Any:
        before = _summaries(peer, name)
        for step in steps:
            step(peer)
        after = _settled(lambda: _summaries(peer, name), before)
        return minus(after[0], before[0]), after[1]

    return run


def _summaries(peer: Peer, name: str) -> tuple[dict[str, int], list[str]]:
    counts, others = {}, []
    for family, labels, value in _SAMPLE.findall(client(peer).get(peer.metrics).text):
        if "_summary_" in family and f'model="{name}"' in labels:
            pairs = ",".join(sorted(labels.split(",")))
            if family.endswith("_count"):
                counts[f"{family} {pairs}"] = int(value)
            else:
                others.append(f"{family} {pairs}")
    return counts, sorted(others)


def families(peer: Peer) -> Any:
    """Every family of Triton's, with its type."""
    text = client(peer).get(peer.metrics).text
    return dict(sorted(re.findall(r"^# TYPE (nv_\w+) (\w+)$", text, re.MULTILINE)))


def custom(peer: Peer) -> Any:
    """The metrics that a model has made."""
    text = client(peer).get(peer.metrics).text
    return sorted(line for line in text.splitlines() if "differential_" in line)


def stats_shape(peer: Peer) -> Any:
    """The statistics' JSON, with the numbers left out."""
    found = client(peer).get("/v2/models/add_sub/stats").json()
    return json.loads(re.sub(r"(?<=:)\d+", "0", json.dumps(found, separators=(",", ":"))))


def three(peer: Peer) -> None:
    for _ in range(3):
        post(peer, model("add_sub"), {"inputs": GOOD})


def failing(code: str) -> Callable[[Peer], Any]:
    return lambda peer: post(peer, model("errors"), {"inputs": [text("CODE", code, (1, 1))]})


def batch(peer: Peer) -> None:
    rows = [tensor(f"INPUT{i}", [0] * 12, [3, 4]) for i in (0, 1)]
    post(peer, model("wildcard"), {"inputs": [tensor("INPUT0", [0] * 9, [3, 1, 3], "INT32")]})
    post(peer, model("wildcard"), {"inputs": rows})


def four_at_once(peer: Peer) -> Any:
    """Four requests that make up a preferred batch are executed as one."""
    body = {"inputs": [tensor(f"INPUT{i}", [1, 2, 3, 4], [1, 4]) for i in (0, 1)]}
    with ThreadPoolExecutor(4) as pool:
        return [f.result()["status"] for f in [pool.submit(post, peer, model("batched"), body) for _ in range(4)]]


def loaded_again(peer: Peer) -> Any:
    """Nothing is told of a model that is not loaded (Triton forgets to remove its failures), and counts begin again."""
    infer(peer)
    unload(peer, "managed")
    wait_until(lambda: state(peer, "managed")[0].get("state") == "UNAVAILABLE")
    told = client(peer).get("/v2/models/stats").json()["model_stats"]
    left = [name for name in metrics_of(peer, "managed") if "_request_failure " not in name]
    listed = "managed" in [each["name"] for each in told]
    load(peer, "managed")
    counts = {name: value for name, value in metrics_of(peer, "managed").items() if 'version="1"' in name}
    return left, listed, statistics(peer, "managed"), counts


CASES = [
    Case("counts: a model that is loaded again", loaded_again),
    Case("counts: infer", counted("add_sub", three)),
    Case(
        "counts: rejected before they run",
        counted("add_sub", lambda peer: post(peer, model("add_sub"), {"inputs": GOOD[:1]})),
    ),
    Case(
        "counts: over gRPC", counted("add_sub", lambda peer: call(peer, "ModelInfer", infer_request("add_sub", *PAIR)))
    ),
    Case("counts: a batch", counted("wildcard", batch)),
    Case("counts: four requests in a batch", counted("batched", four_at_once)),
    Case("counts: errors of the model", counted("errors", failing("NOT_FOUND"), failing("fine"), failing("raise"))),
    Case("counts: a stream", counted("repeat", lambda peer: stream(peer, [repeat(3)]))),
    Case("counts: a stream without responses", counted("repeat", lambda peer: stream(peer, [repeat(0)]))),
    Case("counts: a stream with an error", counted("repeat", lambda peer: stream(peer, [repeat(3, 1)]))),
    Case("counts: a full queue", counted("queue_reject", queue_full)),
    Case("counts: calls of a model", counted("add_sub", bls("plain").run, bls("concurrent").run)),
    Case("counts: the shape of statistics", stats_shape),
    Case("metrics: families", families),
    Case("metrics: summaries", summaries("add_sub", three)),
    Case("metrics: summaries of a batch", summaries("batched", four_at_once)),
    Case("metrics: summaries of a stream", summaries("repeat", lambda peer: stream(peer, [repeat(3)]))),
    Case("metrics: of a model", custom),
]
