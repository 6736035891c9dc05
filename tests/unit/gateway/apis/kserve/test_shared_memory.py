"""Shared memory regions: what is inside is read and written, what is outside is refused, and nobody's end harms us."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from penstock.engines.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnsupportedError,
)
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.infer import InferRpcs
from penstock.gateway.apis.kserve.grpc.rpc import RpcGuard
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.apis.kserve.shared_memory import MAX_REGIONS, RegionStatus, SharedMemoryRegions
from penstock.gateway.requests.call import DrainState, RequestJournal
from penstock.gateway.requests.context import ANYONE, USER_ROLES, Principal, RequestContext
from penstock.gateway.requests.intake import BodyBudget, BodyIntake
from penstock.gateway.transports.http.settings import AppSettings
from support.kserve import FakeModelStore, identity
from support.kserve_http import KServeFront, kserve_context


def contents(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None
    return memory.buf


def rpcs_of(kserve: KServe) -> InferRpcs:
    return InferRpcs(kserve, RpcGuard(None, DrainState(), RequestJournal()), GrpcSettings())


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """1 KiB of 0, 1, ..., 255, 0, 1, ..."""
    made = SharedMemory(f"test_{uuid.uuid4().hex}", create=True, size=1024)
    contents(made)[:] = bytes(range(256)) * 4
    yield made
    made.close()
    made.unlink()


@pytest.fixture
def regions() -> SharedMemoryRegions:
    return SharedMemoryRegions(True)


def test_reads_and_writes_what_was_registered(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    regions.register("r", "/" + memory.name, 16, 64)
    assert regions.read("r", 0, 4) == bytes([16, 17, 18, 19])
    assert regions.read("r", 63, 1) == bytes([79])
    regions.write("r", 60, b"abcd")
    assert bytes(contents(memory)[76:80]) == b"abcd"
    assert contents(memory)[80] == 80


def test_status_lists_regions_and_unregister_forgets_them(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    regions.register("a", memory.name, 0, 8)
    regions.register("b", memory.name, 8, 16)
    assert regions.status() == [RegionStatus("a", memory.name, 0, 8), RegionStatus("b", memory.name, 8, 16)]
    assert regions.status("b") == [RegionStatus("b", memory.name, 8, 16)]
    regions.unregister("a")
    assert regions.read("b", 0, 1) == b"\x08"  # report server#7688: it lies in the same object
    regions.unregister("never")
    with pytest.raises(NotFoundError, match="Unable to find system shared memory region: 'a'"):
        regions.status("a")
    with pytest.raises(NotFoundError, match="Unable to find shared memory region: 'a'"):
        regions.read("a", 0, 1)
    regions.unregister()
    assert regions.status() == []


def test_a_name_is_taken_once(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    regions.register("r", memory.name, 0, 8)
    with pytest.raises(AlreadyExistsError, match="shared memory region 'r' already in manager"):
        regions.register("r", memory.name, 0, 8)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 1025),
        (1000, 25),
        (1024, 1),
        (0, 0),
        (-1, 8),
        (2**64 - 32, 64),
        (0, 2**64 - 32),
        (2**64 - 32, 2**64 - 32),
        (32, 2**64 - 32),
        (0, -8),
        (2**63, 8),
    ],
)
def test_a_region_lies_in_its_object(
    memory: SharedMemory, regions: SharedMemoryRegions, offset: int, size: int
) -> None:
    with pytest.raises(InvalidRequestError, match="failed to register shared memory region 'r': invalid args"):
        regions.register("r", memory.name, offset, size)
    assert regions.status() == []


@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (64, 0, "Invalid offset for"),
        (-1, 8, "Invalid offset for"),
        (2**64 - 32, 64, "Invalid offset for"),
        (0, 65, "Invalid offset \\+ byte size for"),
        (32, 33, "Invalid offset \\+ byte size for"),
        (8, 2**64 - 8, "Invalid offset \\+ byte size for"),
        (0, -1, "Invalid offset \\+ byte size for"),
    ],
)
def test_a_tensor_lies_in_its_region(
    memory: SharedMemory, regions: SharedMemoryRegions, offset: int, size: int, text: str
) -> None:
    regions.register("r", memory.name, 16, 64)
    with pytest.raises(InvalidRequestError, match=f"{text} shared memory region: 'r'"):
        regions.slice("r", offset, size)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "///",
        ".",
        "..",
        "/..",
        "../etc/passwd",
        "/../../etc/passwd",
        "a/b",
        "x\0y",
        "n" * 300,
        "é" * 200,
        "\ud800",
        "test_there_is_no_such_object",
    ],
)
def test_keys_that_name_no_object(regions: SharedMemoryRegions, key: str) -> None:
    with pytest.raises(InvalidRequestError, match="Unable to open shared memory region: '"):
        regions.register("r", key, 0, 8)


@pytest.mark.parametrize("prefix", ["triton_python_backend_shm_region_", "penstock", "sem.", "Penstock"])
@pytest.mark.parametrize("slashes", ["", "/", "///"])
def test_keys_of_servers_are_reserved(regions: SharedMemoryRegions, prefix: str, slashes: str) -> None:
    made = SharedMemory(f"{prefix}_{uuid.uuid4().hex}", create=True, size=64)
    try:
        with pytest.raises(InvalidRequestError, match="reserved"):
            regions.register("r", slashes + made.name, 0, 8)
    finally:
        made.close()
        made.unlink()


def test_links_are_not_followed(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    link = f"/dev/shm/{memory.name}_link"
    os.symlink(f"/dev/shm/{memory.name}", link)
    try:
        with pytest.raises(InvalidRequestError, match="Unable to open"):
            regions.register("r", f"{memory.name}_link", 0, 8)
    finally:
        os.unlink(link)


def test_pipes_are_refused_at_once(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    pipe = f"/dev/shm/{memory.name}_pipe"
    os.mkfifo(pipe)
    try:
        with pytest.raises(InvalidRequestError):
            regions.register("r", f"{memory.name}_pipe", 0, 8)
    finally:
        os.unlink(pipe)


def test_an_object_that_shrinks_gives_an_error(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    """With a mapping, this would end the process."""
    regions.register("r", memory.name, 0, 1024)
    part = regions.slice("r", 512, 512)
    os.truncate(f"/dev/shm/{memory.name}", 600)
    with pytest.raises(InvalidRequestError, match="Invalid offset \\+ byte size"):
        part.read()
    assert regions.read("r", 0, 600) == bytes(range(256)) * 2 + bytes(range(88))


def test_a_request_keeps_its_region(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    regions.register("r", memory.name, 0, 8)
    part = regions.slice("r", 0, 8)
    regions.unregister()
    part.write(b"answered")
    assert bytes(contents(memory)[:8]) == b"answered"
    assert bytes(part.read()) == b"answered"


def test_results_must_fit(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    regions.register("r", memory.name, 0, 64)
    with pytest.raises(InvalidRequestError, match="should be at least 9 bytes"):
        regions.slice("r", 0, 8).write(b"123456789")
    assert bytes(contents(memory)[:9]) == bytes(range(9))


def test_sparse_objects_do_not_fill_the_memory(memory: SharedMemory) -> None:
    os.truncate(f"/dev/shm/{memory.name}", 1 << 40)
    regions = SharedMemoryRegions(True, max_tensor_bytes=4096)
    regions.register("r", memory.name, 0, 1 << 40)
    assert len(regions.read("r", 1 << 30, 4096)) == 4096
    with pytest.raises(InvalidRequestError, match="at most 4096 bytes"):
        regions.slice("r", 0, 4097)


def test_descriptors_are_closed_with_their_regions(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        regions.register("r", memory.name, 0, 8)
        part = regions.slice("r", 0, 8)
        regions.unregister("r")
        assert len(os.listdir("/proc/self/fd")) == before + 1
        del part
    with pytest.raises(InvalidRequestError):
        regions.register("r", memory.name, 0, 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before


def test_there_is_an_end_to_regions(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    for index in range(MAX_REGIONS):
        regions.register(f"r{index}", memory.name, 0, 8)
    with pytest.raises(InvalidRequestError, match="already, unregister some first"):
        regions.register("more", memory.name, 0, 8)
    regions.unregister()


def test_the_operator_has_to_allow_it(memory: SharedMemory) -> None:
    regions = SharedMemoryRegions(False)
    for use in (
        lambda: regions.register("r", memory.name, 0, 8),
        lambda: regions.slice("r", 0, 8),
        regions.unregister,
    ):
        with pytest.raises(UnsupportedError, match="--allow-client-shm"):
            use()
    assert regions.status() == []


def test_there_are_no_cuda_regions(regions: SharedMemoryRegions) -> None:
    with pytest.raises(UnsupportedError, match="CUDA shared memory is not supported"):
        regions.register_cuda("r")
    assert regions.cuda_status() == []
    with pytest.raises(NotFoundError, match="Unable to find cuda shared memory region: 'r'"):
        regions.cuda_status("r")
    regions.unregister_cuda()


def test_what_a_request_reads_counts_before_it_is_in_memory(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    """A short request can name many long tensors: each counts as a body does, and there may be no room for it."""
    regions.register("r", memory.name, 0, 1024)
    context, budget = RequestContext(), BodyBudget(1000)
    context.hold_body(budget, 100)
    mine = regions.of(ANYONE, context.hold_more)
    assert len(mine.read("r", 0, 600)) == 600
    assert budget.held == 700
    with pytest.raises(OverloadedError):
        mine.read("r", 0, 600)
    mine.write("r", 0, bytes(1024))  # written at once, and kept nowhere
    context.end()
    assert budget.held == 0


async def test_requests_over_http_count_what_they_read(memory: SharedMemory) -> None:
    settings = AppSettings(intake=BodyIntake(body_bytes=100))
    front = KServeFront(identity("FP32", name="m"), settings=settings, allow_shared_memory=True)
    registered = await front("POST", "/v2/systemsharedmemory/region/r/register", {"key": memory.name, "byte_size": 256})
    assert registered.status == 200
    for size, status in ((64, 200), (256, 503)):
        inside = {"shared_memory_region": "r", "shared_memory_byte_size": size}
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [size // 4], "parameters": inside}
        assert (await front("POST", "/v2/models/m/infer", {"inputs": [tensor]})).status == status
    assert settings.intake.bodies.held == 0


async def test_requests_over_grpc_count_what_they_read(memory: SharedMemory) -> None:
    model, context, budget = identity("FP32", name="m"), RequestContext(), BodyBudget(1000)
    context.hold_body(budget, 100)
    kserve = kserve_context(FakeModelStore(model), allow_shared_memory=True)
    kserve.shared_memory.register("r", memory.name, 0, 1024)
    message = pb.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="INPUT0", datatype="FP32", shape=[64])
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 256
    no_rpc: Any = None
    await rpcs_of(kserve).decode(message.SerializeToString(), message, model, no_rpc, context)
    assert budget.held == 356


def test_the_status_has_what_requests_still_use(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    mine, other = (Principal(tenant=tenant, roles=USER_ROLES) for tenant in ("mine", "other"))
    context = RequestContext()
    for name in ("in", "out", "idle"):
        regions.of(mine).register(name, memory.name, 0, 8)
    request = regions.of(mine, lambda size: None, context)
    request.read("in", 0, 8)  # what was read is still the request's, as in Triton
    request.slice("out", 0, 8)
    regions.of(mine).unregister()
    assert [each.name for each in regions.of(mine).status()] == ["in", "out"]
    assert regions.of(mine).status("in") == [RegionStatus("in", memory.name, 0, 8)]
    assert regions.of(other).status() == []
    with pytest.raises(NotFoundError):
        regions.of(other).status("in")
    for caller, name in ((other, "in"), (mine, "idle")):
        with pytest.raises(NotFoundError, match=f"Unable to find shared memory region: '{name}'"):
            regions.of(caller).read(name, 0, 1)
    second = RequestContext()
    regions.of(mine, lambda size: None, second).read("in", 0, 8)
    with pytest.raises(AlreadyExistsError):
        regions.of(mine).register("in", memory.name, 0, 8)
    context.end()
    assert [each.name for each in regions.of(mine).status()] == ["in"]
    second.end()
    with pytest.raises(NotFoundError):
        regions.of(mine).read("in", 0, 1)
    assert regions.of(mine).status() == []
    regions.of(mine).register("in", memory.name, 0, 8)


def test_regions_in_use_count_as_well(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    context = RequestContext()
    request = regions.of(ANYONE, lambda size: None, context)
    for index in range(MAX_REGIONS):
        request.register(f"r{index}", memory.name, 0, 8)
        request.slice(f"r{index}", 0, 8)
        request.unregister(f"r{index}")
    with pytest.raises(InvalidRequestError, match="already, unregister some first"):
        regions.register("more", memory.name, 0, 8)
    before = len(os.listdir("/proc/self/fd"))
    context.end()
    regions.register("more", memory.name, 0, 8)
    assert len(os.listdir("/proc/self/fd")) == before - MAX_REGIONS + 1


def test_requests_that_have_ended_are_forgotten(memory: SharedMemory, regions: SharedMemoryRegions) -> None:
    regions.register("r", memory.name, 0, 8)
    for _ in range(100):
        context = RequestContext()
        regions.of(ANYONE, lambda size: None, context).read("r", 0, 8)
        context.end()
    assert len(regions._regions["r"]._requests) <= 16


async def test_a_request_over_http_keeps_its_regions_in_the_status(memory: SharedMemory) -> None:
    model = identity("FP32", name="m")
    model.gate = asyncio.Event()
    front = KServeFront(model, allow_shared_memory=True)
    for name in ("in", "out"):
        await front("POST", f"/v2/systemsharedmemory/region/{name}/register", {"key": memory.name, "byte_size": 64})
    inside = [{"shared_memory_region": name, "shared_memory_byte_size": 64} for name in ("in", "out")]
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [16], "parameters": inside[0]}
    body = {"inputs": [tensor], "outputs": [{"name": "OUTPUT0", "parameters": inside[1]}]}
    answer = asyncio.create_task(front("POST", "/v2/models/m/infer", body))
    await model.waiting.wait()
    await front("POST", "/v2/systemsharedmemory/unregister")
    status = (await front("GET", "/v2/systemsharedmemory/status")).json()
    assert [each["name"] for each in status] == ["in", "out"]
    assert (await front("GET", "/v2/systemsharedmemory/region/in/status")).status == 200
    model.gate.set()
    assert (await answer).status == 200
    assert (await front("GET", "/v2/systemsharedmemory/status")).json() == []


async def test_a_request_over_grpc_keeps_its_regions_in_the_status(memory: SharedMemory) -> None:
    kserve = kserve_context(FakeModelStore(identity("FP32", name="m")), allow_shared_memory=True)
    kserve.shared_memory.register("r", memory.name, 0, 1024)
    message = pb.ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="INPUT0", datatype="FP32", shape=[64])
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 256
    no_rpc: Any = None
    model = kserve.models.model("m")
    inference = rpcs_of(kserve)
    context = RequestContext()
    await inference.decode(message.SerializeToString(), message, model, no_rpc, context)
    kserve.shared_memory.unregister("r")
    assert [each.name for each in kserve.shared_memory.status()] == ["r"]
    context.end()
    assert kserve.shared_memory.status() == []
