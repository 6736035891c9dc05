"""Every route of both protocols is for a role, and keys without it are refused before a body is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from penstock.gateway.apis.operator_views import operator_routes
from penstock.gateway.configuration.config import Config
from penstock.gateway.requests.access import ApiGroup, RequiredHeader, read_restrictions
from penstock.gateway.requests.context import Role
from penstock.gateway.requests.request_watch import RequestWatch, ServerRequests
from penstock.gateway.server.ports.http_apps import build_app, build_metrics_app
from penstock.gateway.transports.http.routes import Match
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane
from support.grpc import SECONDS, each, failure, kserve_of, serving
from support.keys import api_keys
from support.kserve import FakeModelStore, add_sub
from support.kserve_http import kserve_context

INFERENCE = [
    *("POST /v1/chat/completions", "GET /v1/chat/completions", "POST /v1/completions"),
    *(f"{method} /v1/chat/completions/x" for method in ("GET", "POST", "DELETE")),
    "GET /v1/chat/completions/x/messages",
    *("POST /v1/messages", "POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize"),
    "POST /v1/responses/input_tokens",
    *("POST /v1/responses", "GET /v1/responses/x", "DELETE /v1/responses/x"),
    *("POST /v1/responses/x/cancel", "GET /v1/responses/x/input_items"),
    *("POST /v1/conversations", "GET /v1/conversations/x", "POST /v1/conversations/x", "DELETE /v1/conversations/x"),
    *("POST /v1/conversations/x/items", "GET /v1/conversations/x/items"),
    *("GET /v1/conversations/x/items/y", "DELETE /v1/conversations/x/items/y"),
    *("POST /v1/embeddings", "POST /rerank", "POST /v1/rerank", "POST /v2/rerank", "POST /score", "POST /v1/score"),
    *("POST /api/chat", "POST /api/generate", "POST /api/embed", "POST /api/embeddings"),
    *("POST /v1/files", "GET /v1/files", "GET /v1/files/x", "DELETE /v1/files/x", "GET /v1/files/x/content"),
    *("POST /v1/batches", "GET /v1/batches", "GET /v1/batches/x", "POST /v1/batches/x/cancel"),
    *("POST /v1/messages/batches", "GET /v1/messages/batches", "GET /v1/messages/batches/x"),
    *("DELETE /v1/messages/batches/x", "POST /v1/messages/batches/x/cancel", "GET /v1/messages/batches/x/results"),
    *("POST /embed", "POST /v1/embed", "POST /v2/embed"),
    *("POST /classify", "POST /v1/classify", "POST /pooling"),
    *("POST /v2/models/add_sub/infer", "POST /v2/models/add_sub/generate", "POST /v2/models/add_sub/generate_stream"),
    *(f"POST /v2/{kind}sharedmemory/unregister" for kind in ("system", "cuda")),
    *(
        f"POST /v2/{kind}sharedmemory/region/r/{verb}"
        for kind in ("system", "cuda")
        for verb in ("register", "unregister")
    ),
]
METADATA = [
    *("GET /api/tags", "GET /api/ps", "GET /api/version", "POST /api/show", "POST /api/pull"),
    *("POST /api/create", "POST /api/copy", "POST /api/push", "DELETE /api/delete"),
    *("GET /is_sleeping", "GET /version", "GET /openapi.json", "GET /v1/models", "GET /v1/models/tiny"),
    *("GET /server_info", "GET /tokenizer_info"),
    *("GET /v2", "GET /v2/models/stats", "GET /v2/logging", "GET /v2/trace/setting", "POST /v2/repository/index"),
    *(f"GET /v2/models/add_sub{rest}" for rest in ("", "/ready", "/config", "/stats", "/trace/setting")),
    *(f"GET /v2/{kind}sharedmemory{region}/status" for kind in ("system", "cuda") for region in ("", "/region/r")),
    "POST /v2/repository/elsewhere/index",
]
ADMIN = [
    *("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter", "POST /v2/logging", "POST /v2/trace/setting"),
    *("POST /v2/models/add_sub/trace/setting", "POST /v2/repository/models/add_sub/load"),
    *("POST /v2/repository/models/add_sub/unload", "POST /v2/repository/elsewhere/models/add_sub/load"),
    "POST /v2/repository/elsewhere/models/add_sub/unload",
    *("POST /sleep", "POST /wake_up", "POST /reset_prefix_cache"),
    *("POST /v1/models/add_sub/load", "POST /v1/models/add_sub/unload"),
    *("GET /traffic", "GET /traffic/x", "PUT /traffic/x", "DELETE /traffic/x"),
]
ROUTES = [
    *((route, Role.INFERENCE) for route in INFERENCE),
    *((route, Role.METADATA) for route in METADATA),
    *((route, Role.ADMIN) for route in ADMIN),
    *((route, Role.METRICS) for route in ("GET /metrics", "GET /metrics/")),
]
PROBES = [
    *("GET /ping", "POST /ping", "GET /health", "GET /health/live", "GET /health/ready"),
    *("GET /v2/health/live", "GET /v2/health/ready"),
    "GET /",
]


def app_for(*roles: Role, **settings: Any) -> Any:
    keys = api_keys({"team": "sesame"}, frozenset(roles))
    return build_app(FakeDataPlane(), AppSettings(keys=keys, **settings), kserve_context(FakeModelStore(add_sub())))


async def asked(app: Any, route: str, **headers: str) -> AsgiCall:
    method, path = route.split(" ")
    return await call(app, path, b"{}", method=method, headers={"authorization": "Bearer sesame"} | headers)


def said(answer: AsgiCall) -> str:
    if "message" in answer.json():
        return str(answer.json()["message"])  # Cohere's form
    error = answer.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def refused_for_role(answer: AsgiCall) -> bool:
    return answer.status == 403 and said(answer).startswith("This needs a key with the role")


@pytest.mark.parametrize(("route", "role"), ROUTES)
async def test_each_route_is_for_one_role(route: str, role: Role) -> None:
    assert not refused_for_role(await asked(app_for(role), route))
    answer = await asked(app_for(*set(Role) - {role}), route)
    assert refused_for_role(answer)
    assert f"'{role}'" in said(answer)


def test_the_list_here_has_every_route() -> None:
    app = app_for()
    listed = [route.split(" ") for route in (*(route for route, _ in ROUTES), *PROBES)]
    headers: tuple[list[tuple[bytes, bytes]], ...] = ([], [(b"anthropic-version", b"2023-06-01")])
    scopes = [{"method": method, "path": path, "headers": each} for method, path in listed for each in headers]
    found = [app.routes.find(scope) for scope in scopes]
    assert all(isinstance(each, Match) for each in found)
    assert {each.route for each in found} >= {route for route in app.routes.all if "{version}" not in route.name}


async def test_a_refusal_in_the_words_of_openai() -> None:
    answer = await asked(app_for(Role.METADATA), "POST /v1/completions")
    error = answer.json()["error"]
    assert (answer.status, error["type"], error["code"]) == (403, "permission_error", "permission_denied")
    assert error["message"] == "This needs a key with the role 'inference'. The roles of this key: metadata."


@pytest.mark.parametrize("route", PROBES)
async def test_probes_need_no_key(route: str) -> None:
    assert (await asked(app_for(), route, authorization="")).status in (200, 400, 503)


@pytest.mark.parametrize("path", ["/debug/settings", "/debug/requests", "/debug/scheduler", "/debug/scheduler/stream"])
async def test_what_operators_look_at_is_for_admins(path: str) -> None:
    settings = AppSettings(keys=api_keys({"team": "sesame"}, frozenset(Role) - {Role.ADMIN}))
    dataplane: Any = FakeDataPlane()
    requests = ServerRequests(RequestWatch(settings.journal, settings.drain))
    app = build_metrics_app(dataplane, settings, operator_routes(Config(), dataplane, requests))
    assert refused_for_role(await asked(app, f"GET {path}"))


ADMIN_RPCS = {"RepositoryModelLoad", "RepositoryModelUnload"}
INFERENCE_RPCS = {
    *("ModelInfer", "ModelStreamInfer"),
    *(f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Register", "Unregister")),
}
SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


@pytest.mark.parametrize("role", Role)
async def test_each_rpc_is_for_one_role(role: Role) -> None:
    metadata = (("authorization", "Bearer sesame"),)
    async with serving(add_sub(), keys=api_keys({"team": "sesame"}, frozenset(Role) - {role})) as running:
        for method in SERVICE.methods:
            path = f"/{SERVICE.full_name}/{method.name}"
            if method.client_streaming:
                rpc = running.channel.stream_stream(path)(each([]), metadata=metadata, timeout=SECONDS).read()
            else:
                rpc = running.channel.unary_unary(path)(b"", metadata=metadata, timeout=SECONDS)
            try:
                await rpc
                status = "OK"
            except grpc.aio.AioRpcError as error:
                status = error.code().name
            names = {Role.ADMIN: ADMIN_RPCS, Role.INFERENCE: INFERENCE_RPCS, Role.METRICS: set()}
            others = {"ServerLive", "ServerReady", *ADMIN_RPCS, *INFERENCE_RPCS}
            denied = method.name in names[role] if role in names else method.name not in others
            assert (status == "PERMISSION_DENIED") == denied, (method.name, status)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "TraceSetting",
            pb.TraceSettingRequest(settings={"trace_rate": pb.TraceSettingRequest.SettingValue(value=["1"])}),
        ),
        ("LogSettings", pb.LogSettingsRequest(settings={"log_info": {"bool_param": False}})),
    ],
)
async def test_settings_are_read_by_many_and_changed_by_admins(method: str, message: Any) -> None:
    metadata = (("authorization", "Bearer sesame"),)
    async with serving(keys=api_keys({"team": "sesame"}, frozenset({Role.METADATA}))) as running:
        rpc = getattr(running.stub, method)
        before = await rpc(type(message)(), metadata=metadata)
        assert (await failure(rpc(message, metadata=metadata)))[0] == "PERMISSION_DENIED"
        assert await rpc(type(message)(), metadata=metadata) == before


async def test_a_key_for_some_models_sees_no_others_over_kserve() -> None:
    """As in `/v1/models`: a configuration may say much about another tenant's model."""
    keys = api_keys({"team": "sesame"})
    keys._granted = {digest: replace(each, models=("mine",)) for digest, each in keys._granted.items()}
    models = (add_sub("mine"), add_sub("theirs"))
    kserve = kserve_context(FakeModelStore(*models))
    app = build_app(FakeDataPlane(), AppSettings(keys=keys), kserve)
    for rest in ("", "/config", "/stats", "/trace/setting", "/versions/1/config"):
        mine, theirs = [await asked(app, f"GET /v2/models/{name}{rest}") for name in ("mine", "theirs")]
        assert (mine.status, theirs.status) == (200, 403), rest
    listed = (await asked(app, "POST /v2/repository/index")).json()
    counted = (await asked(app, "GET /v2/models/stats")).json()["model_stats"]
    assert [each["name"] for each in (*listed, *counted)] == ["mine", "mine"]
    assert (await asked(app, "GET /version")).json()["runners"] == {}  # there is `tiny`

    metadata = (("authorization", "Bearer sesame"),)
    async with serving(*models, keys=keys) as running:
        stub = running.stub
        for rpc, message in (
            (stub.ModelMetadata, pb.ModelMetadataRequest(name="theirs")),
            (stub.ModelConfig, pb.ModelConfigRequest(name="theirs")),
            (stub.ModelStatistics, pb.ModelStatisticsRequest(name="theirs")),
            (stub.TraceSetting, pb.TraceSettingRequest(model_name="theirs")),
        ):
            assert (await failure(rpc(message, metadata=metadata)))[0] == "PERMISSION_DENIED"
        index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata)
        stats = await stub.ModelStatistics(pb.ModelStatisticsRequest(), metadata=metadata)
        assert [each.name for each in (*index.models, *stats.model_stats)] == ["mine", "mine"]


async def test_a_message_without_a_key_is_not_received() -> None:
    """The call ends though its message never comes."""
    async with serving(add_sub(), keys=api_keys({"team": "sesame"})) as running:
        method = running.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        assert (await failure(method(timeout=SECONDS)))[0] == "UNAUTHENTICATED"


RESTRICTED = {ApiGroup.METADATA: RequiredHeader("pass", "word"), ApiGroup.HEALTH: RequiredHeader("pass", "word")}


async def test_restricted_apis_need_their_header_too() -> None:
    app = app_for(*Role, restrictions=RESTRICTED)
    for route in ("GET /v2", "GET /v2/health/ready", "GET /v1/models"):
        for headers in ({}, {"pass": "wrong"}):
            answer = await asked(app, route, **headers)
            assert (answer.status, said(answer)) == (403, "This API is restricted, expecting header 'pass'")
        assert (await asked(app, route, **{"pass": "word"})).status == 200
    assert (await asked(app, "GET /v2/models/stats")).status == 200


async def test_restricted_protocols_over_grpc() -> None:
    restrictions = read_restrictions(["metadata,model-repository:pass=word"], "triton-grpc-protocol-")
    async with serving(add_sub(), restrictions=restrictions) as running:
        wanted = "This protocol is restricted, expecting header 'triton-grpc-protocol-pass'"
        assert await failure(running.stub.ServerMetadata(pb.ServerMetadataRequest())) == ("UNAVAILABLE", wanted)
        given = (("triton-grpc-protocol-pass", "word"),)
        assert (await running.stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=given)).name
        assert (await running.stub.ServerReady(pb.ServerReadyRequest())).ready


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("metadata", "is not API"),
        ("metadata:pass", "is not API"),
        ("metadata:=x", "is not API"),
        ("metadata,nothing:a=b", "no API is called 'nothing'; there are health, metadata"),
        ("metadata,metadata:a=b", "metadata is restricted twice"),
    ],
)
def test_mistakes_in_restrictions(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_restrictions([text])


@pytest.fixture
def object_in_memory() -> Any:
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=64)
    yield memory.name
    memory.close()
    memory.unlink()


async def test_shared_memory_belongs_to_its_tenant(object_in_memory: str) -> None:
    keys = api_keys({"red": "r", "blue": "b"}, frozenset(Role) - {Role.ADMIN})
    keys._granted |= api_keys({"boss": "admin"})._granted
    red, blue, boss = ((("authorization", f"Bearer {key}"),) for key in ("r", "b", "admin"))

    async with serving(add_sub(), keys=keys, kserve=kserve_of(add_sub())) as running:
        stub = running.stub

        async def seen(metadata: Any) -> list[str]:
            found = await stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(), metadata=metadata)
            return list(found.regions)

        message = pb.SystemSharedMemoryRegisterRequest(name="mine", key="/" + object_in_memory, byte_size=64)
        await stub.SystemSharedMemoryRegister(message, metadata=red)
        assert (await failure(stub.SystemSharedMemoryRegister(message, metadata=blue)))[0] == "ALREADY_EXISTS"
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="mine"), metadata=blue)
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(), metadata=blue)
        assert [await seen(who) for who in (red, blue, boss)] == [["mine"], [], ["mine"]]
        infer = pb.ModelInferRequest(model_name="add_sub")
        for name in ("INPUT0", "INPUT1"):
            tensor = infer.inputs.add(name=name, datatype="FP32", shape=[16])
            tensor.parameters["shared_memory_region"].string_param = "mine"
            tensor.parameters["shared_memory_byte_size"].int64_param = 64
        await stub.ModelInfer(infer, metadata=red)
        status, details = await failure(stub.ModelInfer(infer, metadata=blue))
        assert (status, details) == ("NOT_FOUND", "Unable to find shared memory region: 'mine'")
        await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(), metadata=boss)
        assert await seen(red) == []
