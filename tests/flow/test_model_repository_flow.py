"""A repository on disk, the classic shim and the identity backend, together."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.classic import identity
from penstock.classic.base import BackendInstance, Batch
from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.gateway.models.repository.classic_loader import ClassicLoaders
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings
from penstock.gateway.models.repository.storage import Repository

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [2] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [2] }
instance_group { count: 2 kind: KIND_CPU }
model_warmup { name: "two" batch_size: 2 inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [2] %s } } }
"""
ZEROS = "zero_data: true"


def _write(folder: Path, *versions: int, config: str = CONFIG % ZEROS) -> None:
    for version in versions:
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)


@asynccontextmanager
async def _serving(folder: Path, **settings: Any) -> AsyncIterator[ModelRepository]:
    manager = ModelRepository(RepositorySettings(**settings), ClassicLoaders({}), [Repository(str(folder))])
    try:
        await manager.start()
        yield manager
    finally:
        await manager.stop()


async def _echo(manager: ModelRepository, name: str, value: float) -> float:
    array = np.full((1, 2), value, np.float32)
    response = await manager.model(name).infer(InferRequest(inputs={"INPUT0": Tensor("INPUT0", "FP32", array)}))
    assert response.outputs is not None
    assert response.outputs[0].array.shape == (1, 2)
    return float(response.outputs[0].array[0, 1])


async def test_models_are_served_from_disk_and_reloaded_without_a_gap(tmp_path: Path) -> None:
    _write(tmp_path / "echo", 1, 2)
    async with _serving(tmp_path, control_mode="explicit", load_models=("echo",)) as manager:
        assert manager.ready
        model = manager.model("echo")
        assert (model.version, model.config.instance_group[0].count) == (2, 2)
        assert model.statistics.inference_count == 0, "warm-ups do not count"
        assert manager.load_seconds()["echo", 2] > 0
        answered = 0
        ended = asyncio.Event()

        async def client() -> None:
            nonlocal answered
            while not ended.is_set():
                assert await _echo(manager, "echo", answered) >= 0
                answered += 1

        clients = [asyncio.create_task(client()) for _ in range(4)]
        for version in range(3, 8):
            _write(tmp_path / "echo", version)
            await manager.load("echo")
            assert manager.versions("echo") == [version]
            before = answered
            while answered < before + 20:
                await asyncio.wait(clients, timeout=0.001)
        ended.set()
        await asyncio.gather(*clients)
        assert not model.ready
        await manager.unload("echo")
        assert manager.versions("echo") == []


async def test_a_warm_up_that_cannot_be_keeps_the_model_from_loading(tmp_path: Path) -> None:
    _write(tmp_path / "echo", 1)
    _write(tmp_path / "cold", 1, config=CONFIG % 'input_data_file: "values"')
    async with _serving(tmp_path, exit_on_error=False) as manager:
        assert [(line.name, line.state) for line in manager.index(ready=False)] == [
            ("cold", "UNAVAILABLE"),
            ("echo", "READY"),
        ]
        assert "there is no file 'values' in the model's warmup folder" in manager.index(ready=False)[0].reason
    (tmp_path / "cold" / "warmup").mkdir()
    (tmp_path / "cold" / "warmup" / "values").write_bytes(np.ones(2, np.float32).tobytes())
    async with _serving(tmp_path) as manager:
        assert await _echo(manager, "cold", 3.5) == 3.5


async def test_a_model_behind_a_link_is_served_once_it_can_be_trusted(tmp_path: Path) -> None:
    models, store = tmp_path / "models", tmp_path / "store"
    models.mkdir()
    _write(store / "echo", 1, config=CONFIG % 'input_data_file: "values"')
    (tmp_path / "values").write_bytes(np.ones(2, np.float32).tobytes())
    (store / "echo" / "warmup").mkdir()
    (store / "echo" / "warmup" / "values").symlink_to(tmp_path / "values")
    (models / "echo").symlink_to(store / "echo")
    (tmp_path / "values").chmod(0o666)
    async with _serving(models, control_mode="poll", poll_seconds=1e6, exit_on_error=False) as manager:
        [line] = manager.index(ready=False)
        assert (line.name, line.state) == ("echo", "UNAVAILABLE")
        assert line.reason.startswith("echo/warmup/values of model 'echo' is a link to ")
        assert line.reason.endswith("can be changed by all users: chmod go-w " + str(tmp_path / "values"))
        public = "echo/warmup/values of model 'echo' is a link that is not followed: the place is not trusted"
        assert line.public_reason == public
        (tmp_path / "values").chmod(0o644)
        await manager.poll()
        assert await _echo(manager, "echo", 2.5) == 2.5
        (store / "echo").chmod(0o777)
        await manager.poll()
        assert await _echo(manager, "echo", 3.5) == 3.5, "what serves goes on"
        [line] = manager.index(ready=False)
        assert line.state == "READY"
        assert "echo of model 'echo' is a link to" in line.reason


async def test_reasons_have_names_of_files_that_can_be_shown(tmp_path: Path) -> None:
    models = tmp_path / "models"
    _write(models / "echo", 1)
    (models / "echo" / os.fsdecode(b"a\n\x1b\xff")).symlink_to("/proc/self")
    async with _serving(models, exit_on_error=False) as manager:
        [line] = manager.index(ready=False)
        for reason in (line.reason, line.public_reason or ""):
            assert reason.startswith("echo/a")
            assert reason.isprintable()
            reason.encode()


async def test_every_instance_is_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[int, int]] = []

    def execute(instance: BackendInstance, batch: Batch) -> None:
        executed.append((id(instance), sum(len(call.request.inputs["INPUT0"].array) for call in batch.calls)))
        both_busy.wait(60)
        plainly(instance, batch)

    both_busy = threading.Barrier(2)
    plainly = identity._Instance.execute
    monkeypatch.setattr(identity._Instance, "execute", execute)
    batching = "dynamic_batching { max_queue_delay_microseconds: 3000 default_queue_policy { max_queue_size: 1 } }"
    _write(tmp_path / "echo", 1, config=CONFIG % ZEROS + batching)
    async with _serving(tmp_path) as manager:
        assert manager.ready
    assert len({instance for instance, _ in executed}) == 2
    assert [size for _, size in executed] == [2, 2], "warm-ups do not share a batch"


async def test_changes_on_disk_are_found_by_polls(tmp_path: Path) -> None:
    _write(tmp_path / "echo", 1)
    async with _serving(tmp_path, control_mode="poll", poll_seconds=3600) as manager:
        first = manager.model("echo")
        await manager.poll()
        assert manager.model("echo") is first
        _write(tmp_path / "echo", 1, config=CONFIG % ZEROS + "dynamic_batching { }")
        await manager.poll()
        assert manager.model("echo") is not first
        assert await _echo(manager, "echo", 1.5) == 1.5


async def test_unknown_backends_are_named_with_the_known_ones(tmp_path: Path) -> None:
    _write(tmp_path / "odd", 1, config='backend: "caffe"')
    async with _serving(tmp_path, control_mode="explicit") as manager:
        with pytest.raises(InvalidRequestError, match=r"no backend is called 'caffe'; there are .*identity"):
            await manager.load("odd")


async def test_a_label_file_is_looked_for_before_anybody_asks(tmp_path: Path) -> None:
    labelled = (CONFIG % ZEROS).replace("dims: [2] }\ninstance", 'dims: [2] label_filename: "labels.txt" }\ninstance')
    _write(tmp_path / "m", 1, config=labelled)
    async with _serving(tmp_path, control_mode="explicit") as manager:
        with pytest.raises(EngineError, match=r"the label file 'labels\.txt' cannot be read"):
            await manager.load("m")
        (tmp_path / "m" / "labels.txt").write_text("cat\ndog\n")
        await manager.load("m")
        assert await _echo(manager, "m", 3) == 3
