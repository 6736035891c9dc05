"""Models with `response_cache { enable: true }`, loaded from a repository."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import redis

from penstock.classic import identity
from penstock.classic.base import BackendInstance, Batch, Host, InferModel, ModelContext
from penstock.classic.caching.cache import CachedResponse, ResponseCache
from penstock.classic.caching.cached_model import content_identity, response_key
from penstock.classic.classic_model import ClassicModel
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.repository.classic_loader import ClassicLoaders
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings, build_cache
from penstock.gateway.models.repository.storage import Repository
from support.server import free_port

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [-1] }
response_cache { enable: true }
"""


def _write(repository: Path, config: str = CONFIG) -> None:
    (repository / "echo/1").mkdir(parents=True, exist_ok=True)
    (repository / "echo/config.pbtxt").write_text(config)


@asynccontextmanager
async def _serving(folder: Path, cache: ResponseCache | None) -> AsyncIterator[ModelRepository]:
    settings = RepositorySettings(control_mode="explicit", load_models=("*",))
    manager = ModelRepository(settings, ClassicLoaders({}), [Repository(str(folder))], cache=cache)
    try:
        await manager.start()
        yield manager
    finally:
        await manager.stop()


def _request(*values: float, **fields: object) -> InferRequest:
    array = np.array([values], np.float32)
    return InferRequest(inputs={"INPUT0": Tensor("INPUT0", "FP32", array)}, **fields)  # type: ignore[arg-type]


async def _values(model: InferModel, request: InferRequest) -> list[float]:
    return _of(await model.infer(request))


def _of(response: InferResponse) -> list[float]:
    assert response.outputs is not None
    return [float(value) for value in response.outputs[0].array.ravel()]


def _counts(model: InferModel) -> tuple[int, int, int, int]:
    found = model.statistics
    return found.cache_hit.count, found.cache_miss.count, found.execution_count, found.success.count


async def test_the_same_inputs_are_computed_once(tmp_path: Path) -> None:
    _write(tmp_path)
    async with _serving(tmp_path, build_cache(("local,size=100000",), 0)) as manager:
        model = manager.model("echo")
        assert await _values(model, _request(1, 2, id="first")) == [1, 2]
        assert await _values(model, _request(1, 2, id="second", priority=0)) == [1, 2]
        assert _counts(model) == (1, 1, 1, 2)
        assert await _values(model, _request(1, 3)) == [1, 3]
        assert await _values(model, _request(1, 2, tenant="another")) == [1, 2]
        assert await _values(model, _request(1, 2, parameters={"mode": "x"})) == [1, 2]
        assert _counts(model) == (1, 4, 4, 5)
        [streamed] = [response async for response in model.stream(_request(1, 3))]
        assert _of(streamed) == [1, 3]
        assert _counts(model) == (2, 4, 4, 6)

        _write(tmp_path, CONFIG.replace("8", "4"))
        await manager.load("echo")
        replaced = manager.model("echo")
        assert await _values(replaced, _request(1, 2)) == [1, 2]
        assert _counts(replaced) == (0, 1, 1, 1), "what another load of the model has answered is not found"


PLAIN = CONFIG.replace("response_cache { enable: true }", "")


def _write_ensemble(repository: Path, name: str, step: str, config: str = CONFIG) -> None:
    maps = 'input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" }'
    scheduling = f'ensemble_scheduling {{ step {{ model_name: "{step}" model_version: -1 {maps} }} }}'
    (repository / name / "1").mkdir(parents=True)
    ensemble = config.replace('backend: "identity"', 'platform: "ensemble"')
    (repository / name / "config.pbtxt").write_text(ensemble + scheduling)


async def test_an_ensemble_is_computed_once_until_a_model_of_it_is_loaded_again(tmp_path: Path) -> None:
    """`outer` is made of `inner`, which is made of `echo`."""
    _write(tmp_path, PLAIN)
    _write_ensemble(tmp_path, "inner", "echo", PLAIN)
    _write_ensemble(tmp_path, "outer", "inner")
    async with _serving(tmp_path, build_cache(("local,size=100000",), 0)) as manager:
        outer = manager.model("outer")
        for _ in range(2):
            assert await _values(outer, _request(1, 2)) == [1, 2]
        assert _counts(outer) == (1, 1, 1, 2)
        _write(tmp_path, PLAIN + "instance_group { count: 2 kind: KIND_CPU }")
        await manager.load("echo")
        assert await _values(outer, _request(1, 2)) == [1, 2]
        assert _counts(outer) == (1, 2, 2, 3)
        await manager.unload("echo")
        with pytest.raises(PenstockError):
            await outer.infer(_request(1, 2))


@pytest.mark.parametrize("sequence", [{"correlation_id": 5}, {"sequence_start": True}, {"sequence_end": True}])
async def test_requests_of_sequences_are_computed(tmp_path: Path, sequence: dict[str, object]) -> None:
    _write(tmp_path)
    async with _serving(tmp_path, build_cache(("local,size=100000",), 0)) as manager:
        for about in ({}, sequence, sequence):
            assert await _values(manager.model("echo"), _request(1, **about)) == [1]
        assert _counts(manager.model("echo")) == (0, 1, 3, 3)


async def test_ensembles_that_have_no_cache(tmp_path: Path) -> None:
    _write(tmp_path, PLAIN)
    _write_ensemble(tmp_path, "outer", "echo")
    with pytest.raises(EngineError, match="not supported with a cache that servers share"):
        async with _serving(tmp_path, _SharedCache()):
            pass
    _write(tmp_path, PLAIN + "model_transaction_policy { decoupled: true }")
    with pytest.raises(EngineError, match="model outer with 'Decoupled' transaction policy"):
        async with _serving(tmp_path, build_cache((), 1000)):
            pass


@pytest.mark.parametrize(("count", "on_the_loop"), [(2, True), (1 << 20, False)])
async def test_large_answers_are_copied_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, on_the_loop: bool
) -> None:
    threads = []
    copied = CachedResponse.of

    def noted(response: InferResponse) -> CachedResponse:
        threads.append(threading.get_ident())
        return copied(response)

    monkeypatch.setattr(CachedResponse, "of", noted)
    _write(tmp_path)
    async with _serving(tmp_path, build_cache((), 1 << 24)) as manager:
        request = _request(*[1.0] * count)
        first = await _values(manager.model("echo"), request)
        assert await _values(manager.model("echo"), request) == first
    assert [thread == threading.get_ident() for thread in threads] == [on_the_loop]


async def test_errors_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [True]
    execute = identity._Instance.execute

    def sometimes(self: BackendInstance, batch: Batch) -> None:
        if failing[0]:
            raise ValueError("not now")
        execute(self, batch)

    monkeypatch.setattr(identity._Instance, "execute", sometimes)
    _write(tmp_path)
    async with _serving(tmp_path, build_cache((), 100_000)) as manager:
        model = manager.model("echo")
        with pytest.raises(EngineError, match="not now"):
            await model.infer(_request(1))
        [answer] = [response async for response in model.stream(_request(1))]
        assert "not now" in str(answer.error)
        with pytest.raises(InvalidRequestError):
            await model.infer(InferRequest(inputs={}))
        failing[0] = False
        assert await _values(model, _request(1)) == [1]
        assert _counts(model)[:2] == (0, 1)


async def test_a_server_without_a_cache_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path)
    async with _serving(tmp_path, None) as manager:
        for _ in range(2):
            assert await _values(manager.model("echo"), _request(1)) == [1]
        assert _counts(manager.model("echo")) == (0, 0, 2, 2)
    assert "asks for a response cache, and the server has none" in caplog.text


async def test_decoupled_models_have_none(tmp_path: Path) -> None:
    _write(tmp_path, CONFIG + "model_transaction_policy { decoupled: true }")
    with pytest.raises(EngineError, match="failed to load all models"):
        async with _serving(tmp_path, build_cache((), 1000)):
            pass


@pytest.mark.parametrize(
    "other",
    [
        _request(1, 2, 3),
        _request(1, 2.5),
        _request(1, 2, outputs=("OUTPUT0",)),
        _request(1, 2, parameters={"a": 1}),
        _request(1, 2, tenant="t"),
        InferRequest(inputs={"INPUT1": _request(1, 2).inputs["INPUT0"]}),
        InferRequest(inputs={"INPUT0": Tensor("INPUT0", "FP32", np.array([[1], [2]], np.float32))}),
        InferRequest(inputs={"INPUT0": Tensor("INPUT0", "INT32", np.array([[1, 2]], np.float32).view("<i4"))}),
    ],
)
def test_what_an_answer_depends_on_is_in_its_key(other: InferRequest) -> None:
    request = _request(1, 2)
    assert response_key(b"m", request) == response_key(b"m", _request(1, 2, id="x", timeout_us=5))
    assert response_key(b"m", other) != response_key(b"m", request) != response_key(b"n", request)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("memcached,host=a",), "neither local,KEY=VALUE nor redis,KEY=VALUE"),
        (("local",), "neither"),
        (("local,size=0",), "at least 1 byte"),
        (("local,size=lots",), "local,size: 'lots' is not a size such as 10GiB"),
        (("local,ttl=5",), "local has no option 'ttl', only size"),
        (("redis,port=1",), "redis needs redis,host=NAME"),
        (("redis,host=a", "redis,tls_enabled=maybe"), "redis,tls_enabled is true or false"),
        (("redis,host=a", "redis,sni=b"), "redis has no option 'sni'"),
        (("local,size=5", "redis,host=a"), "a server has one response cache"),
    ],
)
def test_wrong_settings_are_refused(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_cache(texts, 0)


class _SharedCache:
    """Knows no entry."""

    shared = True
    counters = None

    async def start(self) -> None: ...

    async def lookup(self, key: bytes) -> CachedResponse | None:
        return None

    async def insert(self, key: bytes, response: CachedResponse) -> None: ...

    async def close(self) -> None: ...


async def test_a_model_whose_files_cannot_be_read_is_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(context: ModelContext) -> bytes:
        raise OSError("the disk is broken")

    stopped = []
    stop = ClassicModel.stop

    async def noted(self: ClassicModel) -> None:
        stopped.append(self.name)
        await stop(self)

    monkeypatch.setattr("penstock.gateway.models.repository.loading.content_identity", unreadable)
    monkeypatch.setattr(ClassicModel, "stop", noted)
    _write(tmp_path)
    with pytest.raises(EngineError, match="failed to load all models"):
        async with _serving(tmp_path, _SharedCache()):
            pass
    assert stopped == ["echo"]


def test_all_of_a_large_file_is_part_of_the_key(tmp_path: Path) -> None:
    """Training that freezes the first and the last layers changes only its middle."""
    _write(tmp_path)
    folder = tmp_path / "echo"
    config, no_host = ModelConfig(name="echo"), cast(Host, None)
    context = ModelContext(
        name="echo", version=1, config=config, model_folder=folder, version_folder=folder / "1", host=no_host
    )
    weights = bytearray(6 << 20)
    found = set()
    for value in (0, 1):
        weights[3 << 20] = value
        (folder / "1/weights.bin").write_bytes(weights)
        found.add(content_identity(context))
    assert len(found) == 2


def test_what_links_lead_to_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path)
    folder, store = tmp_path / "echo", tmp_path / "store"
    (folder / "1").rename(store)
    (folder / "1").symlink_to(store)
    (folder / "2").symlink_to("1")
    (store / "deep").mkdir()
    (store / "deep" / "up").symlink_to("../../echo")
    weights = store / "deep" / "weights"

    def identity(version: int) -> bytes:
        context = ModelContext(
            name="echo",
            version=version,
            config=ModelConfig(name="echo"),
            model_folder=folder,
            version_folder=folder / str(version),
            host=cast(Host, None),
        )
        return content_identity(context)

    found = set()
    for value in ("a", "b"):
        weights.write_text(value)
        found |= {identity(1), identity(2)}
        assert identity(1) in found
    assert len(found) == 4
    monkeypatch.setattr("penstock.classic.model_files.MAX_LINKED_FILES", 0)
    assert identity(1) != identity(1), "nothing is shared"


# A cache in Redis

REDIS_SERVER = shutil.which("redis-server")


@pytest.fixture
def redis_port(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """Of a server with the flags that a test gives the fixture."""
    if REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    port = free_port()
    flags = getattr(request, "param", ())
    command = [REDIS_SERVER, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("eady to accept" in line for line in process.stdout)
        yield port
        process.terminate()


def _redis(port: int, *options: str) -> ResponseCache | None:
    texts = ("redis,host=127.0.0.1", f"redis,port={port}", *(options or ["redis,db=0"]))
    return build_cache(texts, 0)


async def test_servers_share_a_cache_in_redis(tmp_path: Path, redis_port: int) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        _write(folder)
        (folder / "echo/1/weights.bin").write_bytes(bytes(100))
    async with _serving(first, _redis(redis_port)) as manager:
        assert await _values(manager.model("echo"), _request(1, 2)) == [1, 2]
    async with _serving(second, _redis(redis_port)) as manager:
        model = manager.model("echo")
        assert await _values(model, _request(1, 2)) == [1, 2]
        assert _counts(model) == (1, 0, 0, 1)
    (second / "echo/1/weights.bin").write_bytes(b"other" * 20)
    async with _serving(second, _redis(redis_port)) as manager:
        model = manager.model("echo")
        assert await _values(model, _request(1, 2)) == [1, 2]
        assert _counts(model) == (0, 1, 1, 1), "a model with other files does not find them"


async def test_a_failing_cache_only_misses(tmp_path: Path, redis_port: int, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path / "models")
    async with _serving(tmp_path / "models", _redis(redis_port)) as manager:
        model = manager.model("echo")
        assert await _values(model, _request(7)) == [7]
        with redis.Redis(port=redis_port) as client:
            [key] = client.keys("penstock:response:*")
            client.set(key, b"\x93 what is this?")
            assert await _values(model, _request(7)) == [7]
            assert "cannot be read" in caplog.text
            client.shutdown(nosave=True)
        assert await _values(model, _request(7)) == [7]
        assert "does not answer" in caplog.text
        assert _counts(model)[0] == 0


@pytest.mark.parametrize("redis_port", [("--requirepass", "secret")], indirect=True)
async def test_a_cache_that_refuses_us_ends_the_start(tmp_path: Path, redis_port: int) -> None:
    _write(tmp_path / "models")
    for options, reason in (
        (("redis,password=wrong",), "WRONGPASS"),
        ((), "NOAUTH"),
        (("redis,password=secret", "redis,db=99"), "ERR DB index is out of range"),
    ):
        with pytest.raises(EngineError, match=f"Redis server refuses user, password or database: {reason}"):
            async with _serving(tmp_path / "models", _redis(redis_port, *options)):
                pass
    async with _serving(tmp_path / "models", _redis(redis_port, "redis,password=secret", "redis,connect_timeout=0")):
        pass


async def test_a_cache_that_cannot_be_reached_may_come_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path)
    async with _serving(tmp_path, _redis(free_port())) as manager:
        assert "does not answer" in caplog.text
        assert await _values(manager.model("echo"), _request(7)) == [7]
