"""Trace settings, log settings and shared memory over HTTP: Triton's bodies, texts and statuses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest

from penstock.gateway.apis.kserve import http_administration
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from support.endpoint import Endpoint, answer, kserve
from support.kserve import FakeModelStore, add_sub


@pytest.fixture
def context() -> KServe:
    return kserve(FakeModelStore(add_sub()))


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory(f"test_{uuid.uuid4().hex}", create=True, size=1024)
    yield made
    made.close()
    made.unlink()


def endpoint(function: Any, context: KServe, *arguments: str, **options: Any) -> Endpoint:
    return lambda exchange: function(context, exchange, *arguments, **options)


async def test_trace_settings(context: KServe) -> None:
    trace = partial(endpoint, http_administration.trace_settings, context)
    status, settings = await answer(trace(update=False))
    assert (status, settings["trace_level"], settings["trace_rate"]) == (200, ["OFF"], "1000")
    status, settings = await answer(trace("add_sub", update=True), {"trace_rate": "5", "trace_level": ["TIMESTAMPS"]})
    assert (status, settings["trace_level"], settings["trace_rate"]) == (200, ["TIMESTAMPS"], "5")
    assert (await answer(trace("add_sub", update=False)))[1] == settings
    assert (await answer(trace(update=False)))[1]["trace_rate"] == "1000"
    assert (await answer(trace(update=True), {"trace_file": "/etc/passwd"})) == (
        501,
        {"error": "trace file location can not be updated through network protocol"},
    )
    assert await answer(trace("add_sub", update=True), {"foo": "x"}) == (400, {"error": "unknown trace setting 'foo'"})


@pytest.mark.parametrize("update", [False, True])
async def test_traces_of_an_unknown_model(context: KServe, update: bool) -> None:
    assert await answer(endpoint(http_administration.trace_settings, context, "x", update=update), b"{}") == (
        400,
        {"error": "Request for unknown model : x"},
    )


async def test_log_settings(context: KServe) -> None:
    log = partial(endpoint, http_administration.log_settings, context)
    status, before = await answer(log(update=False))
    assert (status, before["log_format"]) == (200, "default")
    assert (await answer(log(update=True), {"log_format": "ISO8601"}))[1] == before | {"log_format": "ISO8601"}
    assert await answer(log(update=True), {"log_file": "x"}) == (
        501,
        {"error": "log file location can not be updated through network protocol"},
    )
    assert await answer(log(update=True), {"log_info": "yes"}) == (400, {"error": "log_info must be a boolean"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"1", b'{"a":' * 200 + b"1" + b"}" * 200, b"\xff", b"NaN"])
async def test_bodies_that_are_no_settings(context: KServe, body: bytes) -> None:
    for function in (http_administration.trace_settings, http_administration.log_settings):
        status, said = await answer(endpoint(function, context, update=True), body)
        assert (status, list(said)) == (400, ["error"])


async def test_shared_memory_regions(context: KServe, memory: SharedMemory) -> None:
    status = partial(endpoint, http_administration.shared_memory_status, context, "system")
    register = endpoint(http_administration.register_shared_memory, context, "system", "r")
    unregister = partial(endpoint, http_administration.unregister_shared_memory, context, "system")
    assert await answer(status()) == (200, [])
    assert await answer(register, {"key": memory.name, "offset": 16, "byte_size": 64}) == (200, None)
    shown = [{"name": "r", "key": memory.name, "offset": 16, "byte_size": 64}]
    assert await answer(status()) == (200, shown)
    assert await answer(status("r")) == (200, shown)
    assert await answer(register, {"key": memory.name, "byte_size": 64}) == (
        400,
        {"error": "shared memory region 'r' already in manager"},
    )
    assert await answer(unregister("never")) == (200, None)
    assert await answer(unregister("r")) == (200, None)
    assert await answer(status("r")) == (404, {"error": "Unable to find system shared memory region: 'r'"})
    assert await answer(register, {"key": memory.name, "byte_size": 1024}) == (200, None)
    assert await answer(unregister()) == (200, None)
    assert await answer(status()) == (200, [])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"byte_size": 1}, "Shared memory register request has no 'key' field"),
        ({"key": "k"}, "Shared memory register request has no 'byte_size' field"),
        ({"key": 1, "byte_size": 1}, "'key' must be a string"),
        ({"key": "k", "byte_size": "64"}, "'byte_size' must be an unsigned 64-bit integer"),
        ({"key": "k", "byte_size": True}, "'byte_size' must be"),
        ({"key": "k", "byte_size": 1.0}, "'byte_size' must be"),
        ({"key": "k", "byte_size": 2**64}, "'byte_size' must be"),
        ({"key": "k", "byte_size": 8, "offset": -1}, "'offset' must be"),
        ({"key": "/nonexist", "byte_size": 8}, "Unable to open shared memory region: '/nonexist'"),
        ({"key": "///", "byte_size": 8}, "Unable to open"),
        ({"key": "k", "byte_size": 8, "foo": 1}, "unknown field 'foo'"),
        ({"key": "triton_python_backend_shm_region_0", "byte_size": 8}, "reserved"),
    ],
)
async def test_bad_registrations(context: KServe, body: dict[str, Any], text: str) -> None:
    status, said = await answer(endpoint(http_administration.register_shared_memory, context, "system", "r"), body)
    assert status == 400
    assert text in said["error"]


async def test_shared_memory_is_off_unless_allowed() -> None:
    context = kserve(FakeModelStore(), shared_memory=SharedMemoryRegions(False))
    register = endpoint(http_administration.register_shared_memory, context, "system", "r")
    status, said = await answer(register, {"key": "k", "byte_size": 1})
    assert status == 501
    assert "--allow-client-shm" in said["error"]


async def test_cuda_shared_memory_is_refused_by_name(context: KServe) -> None:
    body = {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64}
    status, said = await answer(endpoint(http_administration.register_shared_memory, context, "cuda", "r"), body)
    assert status == 501
    assert "CUDA shared memory is not supported" in said["error"]
    shown = partial(endpoint, http_administration.shared_memory_status, context, "cuda")
    assert await answer(shown()) == (200, [])
    assert await answer(shown("r")) == (404, {"error": "Unable to find cuda shared memory region: 'r'"})
    assert await answer(endpoint(http_administration.unregister_shared_memory, context, "cuda")) == (200, None)
