"""The rate limiter on a real server, under Triton's flags."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from support.server import Server, serving

CONFIG = """
backend: "identity"
max_batch_size: 1
input {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }}
instance_group {{ kind: KIND_CPU count: 2 rate_limiter {{ resources [ {{ name: "R" count: {count} }} ] }} }}
parameters {{ key: "execute_delay_ms" value {{ string_value: "10" }} }}
"""


def write(repository: Path, name: str, count: int) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(count=count))


def ask(server: Server, model: str) -> None:
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32", "data": [7]}]}
    answer = httpx.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=60)
    assert answer.json()["outputs"][0]["data"] == [7]


def executions(trace: Path) -> list[tuple[int, int]]:
    """Beginning and end of each, in the order of their beginnings."""
    found: dict[int, dict[str, int]] = {}
    events: list[dict[str, Any]] = json.loads(trace.read_text())
    for event in events:
        times = {each["name"]: each["ns"] for each in event.get("timestamps", [])}
        found.setdefault(event["id"], {}).update(times)
    return sorted((times["COMPUTE_START"], times["COMPUTE_END"]) for times in found.values())


def test_models_with_one_resource_execute_one_after_the_other(tmp_path: Path) -> None:
    repository, trace = tmp_path / "models", tmp_path / "trace.json"
    write(repository, "a", 1)
    write(repository, "b", 1)
    write(repository, "greedy", 2)
    flags = ("--model-repository", str(repository), "--model-control-mode=explicit", "--load-model=a", "--load-model=b")
    limits = ("--rate-limit=execution_count", "--rate-limit-resource=R:1")
    tracing = ("--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", f"--trace-config=triton,file={trace}")
    with serving(*flags, *limits, *tracing) as server:
        server.wait_for_log(r"ready: 2 models: a 1, b 1")
        refused = httpx.post(f"{server.url}/v2/repository/models/greedy/load", timeout=60)
        assert refused.status_code == 400
        told = 'Resource count for "R" is limited to 1 which will prevent scheduling of one or more model instances'
        assert told in refused.json()["error"]
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda model: ask(server, model), ["a", "b"] * 12))
        assert server.stop() == 0  # the file is complete then
    found = executions(trace)
    assert len(found) == 24
    assert all(ended <= began for (_, ended), (began, _) in pairwise(found))
