"""The gRPC port's edges: keys, TLS, limits, deadlines, callers that leave, the drain."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from penstock.gateway.apis.kserve.grpc.server import GrpcServer
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.requests.tls import TlsSettings
from support.grpc import (
    SECONDS,
    Running,
    add_sub_request,
    each,
    failure,
    infer_request,
    read_all,
    serving,
    transport,  # noqa: F401
)
from support.keys import api_keys
from support.kserve import add_sub, identity, repeat
from support.tls import make_certificate, shown_certificate, tls_settings, use_certificate

BEARER = (("authorization", "Bearer sesame"),)
OPEN = {"ServerLive", "ServerReady"}


async def test_without_a_key_only_probes_are_answered() -> None:
    model = add_sub()
    async with serving(model, keys=api_keys({"tenant": "sesame"})) as running:
        service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        for method in service.methods:
            path = f"/{service.full_name}/{method.name}"
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "sesame"),)):
                if method.client_streaming:
                    call = running.channel.stream_stream(path)(metadata=metadata).read()
                else:
                    call = running.channel.unary_unary(path)(b"", metadata=metadata)
                if method.name in OPEN:
                    await call
                else:
                    status, details = await failure(call)
                    assert status == "UNAUTHENTICATED", method.name
                    assert "wrong" not in details
        reflection = running.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        assert (await failure(reflection().read()))[0] == "UNAUTHENTICATED"
        assert await health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest())
        assert not model.requests
        await running.stub.ModelInfer(add_sub_request(), metadata=BEARER)
        await read_all(running.stub.ModelStreamInfer(each([add_sub_request()]), metadata=BEARER))
        assert [request.tenant for request in model.requests] == ["tenant", "tenant"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client", "stranger"):
        make_certificate(folder, name)
    return folder


def tls(folder: Path, **options: object) -> TlsSettings:
    return tls_settings("grpc", folder, **options)


async def infer_over_tls(running: Running, folder: Path, client: str | None) -> list[float]:
    """With tritonclient, and this client's certificate."""

    def run() -> list[float]:
        with triton.InferenceServerClient(
            f"localhost:{running.server.port}",
            ssl=True,
            root_certificates=f"{folder}/server.pem",
            private_key=client and f"{folder}/{client}.key",
            certificate_chain=client and f"{folder}/{client}.pem",
        ) as connection:
            tensors = []
            for name in ("INPUT0", "INPUT1"):
                tensor = triton.InferInput(name, [16], "FP32")
                tensor.set_data_from_numpy(np.ones(16, np.float32))
                tensors.append(tensor)
            found = connection.infer("add_sub", tensors, client_timeout=SECONDS).as_numpy("OUTPUT0")
            return [float(value) for value in found]

    return await asyncio.to_thread(run)


async def test_tls_is_all_that_the_port_speaks_when_it_is_on(certificates: Path) -> None:
    async with serving(add_sub(), tls=tls(certificates)) as running:
        assert await infer_over_tls(running, certificates, None) == [2.0] * 16
        status, _ = await failure(running.stub.ServerLive(pb.ServerLiveRequest()))
        assert status == "UNAVAILABLE", "the port answers without TLS, too"


async def test_mutual_tls(certificates: Path) -> None:
    mutual = tls(certificates, use_ssl_mutual=True, root_cert=f"{certificates}/client.pem")
    async with serving(add_sub(), tls=mutual) as running:
        assert await infer_over_tls(running, certificates, "client") == [2.0] * 16
        for client in (None, "stranger"):
            with pytest.raises(triton.InferenceServerException):
                await infer_over_tls(running, certificates, client)


async def test_a_key_of_another_certificate_is_named(certificates: Path) -> None:
    settings = replace(tls(certificates), server_key=f"{certificates}/client.key")
    with pytest.raises(ValueError, match="grpc-server-cert: it cannot be used with grpc-server-key"):
        async with serving(add_sub(), tls=settings):
            pass


async def test_new_certificates_are_for_new_connections(certificates: Path, tmp_path: Path) -> None:
    use_certificate(tmp_path, certificates, "server")
    async with serving(add_sub(), repeat(), tls=tls(tmp_path)) as running:
        port = running.server.port
        assert await asyncio.to_thread(shown_certificate, port) == (certificates / "server.pem").read_text()
        trusted = grpc.ssl_channel_credentials((certificates / "server.pem").read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{port}", trusted) as channel:
            stub = GRPCInferenceServiceStub(channel)
            await stub.ServerLive(pb.ServerLiveRequest())
            use_certificate(tmp_path, certificates, "client")
            running.server.reload_certificates()
            while await asyncio.to_thread(shown_certificate, port) != (certificates / "client.pem").read_text():
                pass
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live, "the old connection lives on"


async def test_message_limit() -> None:
    async with serving(identity("UINT8"), max_message_bytes=1 << 20) as running:
        fits = infer_request("identity_uint8", {"INPUT0": np.zeros((1 << 20) - 200, np.uint8)})
        assert len((await running.stub.ModelInfer(fits)).raw_output_contents[0]) == (1 << 20) - 200
        large = infer_request("identity_uint8", {"INPUT0": np.zeros(1 << 20, np.uint8)})
        assert (await failure(running.stub.ModelInfer(large)))[0] == "RESOURCE_EXHAUSTED"
        await failure(read_all(running.stub.ModelStreamInfer(each([large]))))
        assert await running.stub.ModelInfer(fits)


async def test_messages_of_many_megabytes() -> None:
    async with serving(identity("UINT8")) as running:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(running.address, options=options) as channel:
            data = np.arange(32 << 20, dtype=np.uint32).astype(np.uint8)
            answer = await GRPCInferenceServiceStub(channel).ModelInfer(
                infer_request("identity_uint8", {"INPUT0": data})
            )
            assert answer.raw_output_contents[0] == data.tobytes()


async def test_metadata_limit() -> None:
    async with serving(add_sub()) as running:
        status, _ = await failure(running.stub.ModelInfer(add_sub_request(), metadata=(("x", "y" * 20_000),)))
        assert status in {"RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE"}
        assert await running.stub.ModelInfer(add_sub_request(), metadata=(("x", "y" * 4_000),))


@pytest.mark.parametrize(("level", "most"), [("none", None), ("low", 50_000), ("medium", 50_000), ("high", 50_000)])
async def test_compressed_responses(level: str, most: int | None) -> None:
    """Counted where they pass by, on the wire."""
    async with serving(identity("UINT8"), infer_response_compression_level=level) as running:
        passed = 0

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal passed
            there_reader, there = await asyncio.open_connection("127.0.0.1", running.server.port)
            sending = asyncio.create_task(copy(reader, there))
            while data := await there_reader.read(1 << 16):
                passed += len(data)
                writer.write(data)
            sending.cancel()
            writer.close()

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data)
            writer.close()

        proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}") as channel:
            request = infer_request("identity_uint8", {"INPUT0": np.zeros(1 << 20, np.uint8)})
            answer = await GRPCInferenceServiceStub(channel).ModelInfer(request)
            assert answer.raw_output_contents[0] == bytes(1 << 20)
        proxy.close()
        if most is None:
            assert passed > 1 << 20
        else:
            assert passed < most


async def test_keepalive_and_connection_age_are_accepted() -> None:
    async with serving(
        add_sub(),
        keepalive_time=10_000,
        keepalive_timeout=5_000,
        keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
        http2_min_recv_ping_interval_without_data=10_000,
        http2_max_ping_strikes=0,
        max_connection_age=60_000,
        max_connection_age_grace=1_000,
    ) as running:
        assert await running.stub.ModelInfer(add_sub_request())


async def test_connections_end_at_their_age() -> None:
    async with serving(add_sub(), max_connection_age=300, max_connection_age_grace=20_000) as running:
        assert await running.stub.ModelInfer(add_sub_request())
        await running.channel.channel_ready()
        await asyncio.wait_for(running.channel.wait_for_state_change(grpc.ChannelConnectivity.READY), SECONDS)
        assert await running.stub.ModelInfer(add_sub_request(), wait_for_ready=True)


async def test_the_deadline_reaches_the_model_and_cancels_it() -> None:
    model = add_sub()
    model.gate = asyncio.Event()
    async with serving(model) as running:
        status, _ = await failure(running.stub.ModelInfer(add_sub_request(), timeout=1))
        assert status == "DEADLINE_EXCEEDED"
        await asyncio.wait_for(model.cancelled.wait(), SECONDS)
        deadline = model.requests[0].deadline
        assert deadline is not None
        assert deadline < asyncio.get_running_loop().time() + 1
        model.gate = None
        await running.stub.ModelInfer(add_sub_request())
        assert model.requests[1].deadline is None
        assert await running.drain.wait_idle(SECONDS)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_caller_that_leaves_cancels_its_request(how: str) -> None:
    model = add_sub()
    model.gate = asyncio.Event()
    async with serving(model) as running:
        channel = grpc.aio.insecure_channel(running.address)
        call = GRPCInferenceServiceStub(channel).ModelInfer(add_sub_request())
        await asyncio.wait_for(model.waiting.wait(), SECONDS)
        if how == "cancel":
            call.cancel()
        await channel.close()
        await asyncio.wait_for(model.cancelled.wait(), SECONDS)
        assert await running.drain.wait_idle(SECONDS)


async def test_drain_lets_what_runs_end_and_refuses_the_rest() -> None:
    model = add_sub()
    model.gate = asyncio.Event()
    async with serving(model, repeat()) as running:
        call = asyncio.ensure_future(running.stub.ModelInfer(add_sub_request()))
        await asyncio.wait_for(model.waiting.wait(), SECONDS)
        running.drain.begin()
        await running.server.drain()
        refused = ("UNAVAILABLE", "GRPC server is shutting down and has stopped accepting new requests.")
        assert await failure(running.stub.ModelInfer(add_sub_request())) == refused
        assert await failure(running.stub.ModelMetadata(pb.ModelMetadataRequest(name="add_sub"))) == refused
        assert await failure(running.stub.ModelStreamInfer().read()) == refused
        assert (await running.stub.ServerLive(pb.ServerLiveRequest())).live
        assert not (await running.stub.ServerReady(pb.ServerReadyRequest())).ready
        assert running.drain.in_flight == 1
        model.gate.set()
        assert (await call).id == "7"
        assert await running.drain.wait_idle(SECONDS)


async def test_a_drain_asks_clients_for_other_connections(transport: str) -> None:  # noqa: F811
    """Balancers' connections last for hours: without this their next calls would come here, too."""
    if transport == "grpcio":
        pytest.skip("the gRPC library says it when it stops")
    async with serving(add_sub()) as running:
        await running.stub.ModelInfer(add_sub_request())
        assert running.channel.get_state() is grpc.ChannelConnectivity.READY
        await running.server.drain()
        await asyncio.wait_for(running.channel.wait_for_state_change(grpc.ChannelConnectivity.READY), SECONDS)
        await running.stub.ModelInfer(add_sub_request())  # over a connection of its own, since it is served still


async def test_what_runs_longer_than_the_drain_is_ended() -> None:
    model = add_sub()
    model.gate = asyncio.Event()
    async with serving(model) as running:
        call = asyncio.ensure_future(failure(running.stub.ModelInfer(add_sub_request())))
        await asyncio.wait_for(model.waiting.wait(), SECONDS)
        running.drain.expire()
        assert (await call)[0] == "UNAVAILABLE"
        assert model.cancelled.is_set()
        assert await running.drain.wait_idle(SECONDS)


async def test_forwarded_metadata() -> None:
    model = add_sub()
    async with serving(model, header_forward_pattern=re.compile("my_.*|priority")) as running:
        await running.stub.ModelInfer(add_sub_request(), metadata=(("my_header", "v"), ("other", "w")))
        assert model.requests[0].parameters == {"my_header": "v"}
        await running.stub.ModelInfer(add_sub_request(), metadata=(("my_header", " v w  "), ("my_other", " ")))
        assert model.requests[1].parameters == {"my_header": " v w  ", "my_other": " "}
        status, message = await failure(running.stub.ModelInfer(add_sub_request(), metadata=(("priority", "1"),)))
        assert (status, "its name is reserved" in message) == ("INVALID_ARGUMENT", True), message


async def test_the_port_is_never_shared_in_silence() -> None:
    async with serving(add_sub()) as running:
        with pytest.raises(OSError, match="in use"):
            GrpcServer(GrpcSettings(port=running.server.port), running.kserve, lambda: True)


async def test_requests_without_tensors_are_small() -> None:
    async with serving(add_sub()) as running:
        for call in (
            running.stub.ModelConfig(pb.ModelConfigRequest(name="x" * (2 << 20))),
            running.stub.LogSettings(pb.LogSettingsRequest(settings={"x" * (2 << 20): {}})),
        ):
            assert (await failure(call))[0] == "RESOURCE_EXHAUSTED"
        load = pb.RepositoryModelLoadRequest(model_name="m")
        load.parameters["config"].string_param = "{}"
        load.parameters["file:1/model.py"].bytes_param = b"x" * (2 << 20)
        await running.stub.RepositoryModelLoad(load)
