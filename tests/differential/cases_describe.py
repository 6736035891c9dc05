"""What servers tell of themselves and their models over HTTP, and what they answer to wrong addresses."""

from __future__ import annotations

from typing import Any

from differential.observe import Case, Http

MODELS = ("add_sub", "batched", "repeat", "optional", "reshaped", "classes", "warm", "queue_reject", "some_versions")


def get(path: str, **options: Any) -> Case:
    return Http(f"GET {path}", "GET", path, **options).case()


def ask(method: str, path: str, name: str | None = None, body: Any = None) -> Case:
    return Http(name or f"{method} {path}", method, path, body).case()


SERVER = [get("/v2", exact=False), get("/v2/health/live"), get("/v2/health/ready"), get("/v2/models/stats/")]
METADATA = [
    *(get(f"/v2/models/{name}") for name in MODELS),
    *(get(f"/v2/models/{name}/config", exact=False) for name in MODELS),
    *(get(f"/v2/models/{name}/ready") for name in ("add_sub", "nowhere", "broken", "misconfigured")),
    *(get(f"/v2/models/add_sub/versions/{version}/ready") for version in ("1", "9")),
    *(get(f"/v2/models/add_sub/versions/{version}") for version in ("1", "9", "x", "01")),
    *(get(f"/v2/models/some_versions/versions/{version}") for version in ("1", "2")),
    *(get(f"/v2/models/nowhere{what}") for what in ("", "/config", "/stats")),
    get("/v2/models/broken"),
    get("/v2/models/add_sub/versions/9/stats"),
    get("/v2/models/add_sub/versions/9/config"),
    get("/v2/models/add_sub?x=1"),
    get("/v2/models/add%5Fsub"),
]
WRONG = [
    *(get(path) for path in ("/v2/", "/v2/nothing", "/nothing", "/v2/models", "/v2/models/add_sub/")),
    *(get(path) for path in ("/v2/models/add_sub/infer", "/v2/models//infer", "/v2/repository/index")),
    ask("POST", "/v2"),
    ask("POST", "/v2/health/live"),
    ask("POST", "/v2/models/add_sub"),
    ask("DELETE", "/v2/models/add_sub/infer"),
    ask("PUT", "/v2/models/add_sub/infer"),
    ask("POST", "/v2/models/stats"),
    ask("POST", "/v2/repository/models/add_sub/nothing", body={}),
]
SETTINGS = [
    get("/v2/trace/setting", exact=False),
    get("/v2/models/add_sub/trace/setting", exact=False),
    get("/v2/models/nowhere/trace/setting"),
    ask("POST", "/v2/models/add_sub/trace/setting", "trace: of one model", {"trace_rate": "7", "trace_level": ["OFF"]}),
    ask(
        "POST",
        "/v2/models/add_sub/trace/setting",
        "trace: back to the server's",
        {"trace_rate": None, "trace_level": None},
    ),
    ask("POST", "/v2/trace/setting", "trace: an unknown key", {"trace_color": "red"}),
    ask("POST", "/v2/trace/setting", "trace: the file", {"trace_file": "x"}),
    ask("POST", "/v2/trace/setting", "trace: an unknown level", {"trace_level": ["LOUD"]}),
    ask("POST", "/v2/trace/setting", "trace: a rate that is no number", {"trace_rate": "often"}),
    ask("POST", "/v2/trace/setting", "trace: not JSON", b"{"),
    get("/v2/logging", exact=False),
    ask("POST", "/v2/logging", "logging: verbose", {"log_verbose_level": 1}),
    ask("POST", "/v2/logging", "logging: not verbose", {"log_verbose_level": 0}),
    ask("POST", "/v2/logging", "logging: an unknown key", {"log_color": "red"}),
    ask("POST", "/v2/logging", "logging: the file", {"log_file": "x"}),
    ask("POST", "/v2/logging", "logging: no boolean", {"log_info": "yes"}),
    ask("POST", "/v2/logging", "logging: an unknown format", {"log_format": "poem"}),
]
SHARED_MEMORY = [
    get("/v2/systemsharedmemory/status"),
    get("/v2/systemsharedmemory/region/zz/status"),
    get("/v2/cudasharedmemory/status"),
    get("/v2/cudasharedmemory/region/zz/status"),
    ask(
        "POST",
        "/v2/systemsharedmemory/region/zz/register",
        "shared memory: no such key",
        {"key": "/nonexist", "offset": 0, "byte_size": 8},
    ),
    ask("POST", "/v2/systemsharedmemory/region/zz/register", "shared memory: no size", {"key": "/nonexist"}),
    ask("POST", "/v2/systemsharedmemory/region/zz/unregister", "shared memory: unknown region goes"),
    ask("POST", "/v2/systemsharedmemory/unregister", "shared memory: all go"),
    ask("POST", "/v2/cudasharedmemory/unregister", "CUDA shared memory: all go"),
]

CASES = [*SERVER, *METADATA, *WRONG, *SETTINGS, *SHARED_MEMORY]
