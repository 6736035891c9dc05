"""The tensorrt backend, driven with stand-ins for the packages and the GPU."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf import text_format

from penstock.classic import instances
from penstock.classic.base import BackendInstance, InstanceContext
from penstock.classic.loading import load_model
from penstock.classic.tensorrt.backend import TensorRTBackend
from penstock.classic.tensors import Array
from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from support.backends import RecordedBatch, RecordedCall, load, model_config, model_context, run
from support.classic import output, request
from support.tensorrt import DataType, MemcpyKind, StandInCudaRuntime, StandInEngine, StandInTensorRT, TensorFormat


def add_sub(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {"SUM": arrays["A"] + arrays["B"], "DIFFERENCE": arrays["A"] - arrays["B"]}


def profile(lowest: int, highest: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    return dict.fromkeys(("A", "B"), ((lowest, 4), (lowest, 4), (highest, 4)))


ENGINE = StandInEngine(
    {"A": (-1, 4), "B": (-1, 4)}, {"SUM": (-1, 4), "DIFFERENCE": (-1, 4)}, add_sub, [profile(1, 4), profile(5, 8)]
)


class Machine(NamedTuple):
    tensorrt: StandInTensorRT
    cuda: StandInCudaRuntime
    folder: Path

    def load(self, config: str = "", **where: Any) -> BackendInstance:
        return load(TensorRTBackend({}), model_config(config), self.folder, **({"kind": "GPU"} | where))


def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **engine: Any) -> Machine:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.plan").write_bytes(b"plan")
    tensorrt, cuda = StandInTensorRT(plan=replace(ENGINE, **engine)), StandInCudaRuntime()
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", cuda)
    return Machine(tensorrt, cuda, folder)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return machine(monkeypatch, tmp_path)


def floats(rows: int) -> Array:
    return np.random.default_rng(rows).random((rows, 4), np.float32)


def test_a_configuration_is_completed_from_the_engine(gpu: Machine) -> None:
    config = model_config()
    TensorRTBackend({}).auto_complete(config, gpu.folder)
    expected = """max_batch_size: 8 dynamic_batching { }
      input { name: "A" data_type: TYPE_FP32 dims: 4 } input { name: "B" data_type: TYPE_FP32 dims: 4 }
      output { name: "SUM" data_type: TYPE_FP32 dims: 4 } output { name: "DIFFERENCE" data_type: TYPE_FP32 dims: 4 }"""
    assert text_format.MessageToString(config) == text_format.MessageToString(model_config(expected))


def test_batches_of_any_size_in_memory_that_grows(gpu: Machine) -> None:
    instance = gpu.load()
    for rows in (2, 4, 1):
        first, second = ({"A": floats(rows), "B": floats(rows)}, {"A": floats(rows) * 2, "B": floats(rows)})
        batch = RecordedBatch(RecordedCall(first)) if rows > 2 else RecordedBatch(*map(RecordedCall, (first, second)))
        instance.execute(batch)
        gathered = batch.gather()
        np.testing.assert_array_equal(batch.outputs["SUM"], gathered["A"] + gathered["B"])
        np.testing.assert_array_equal(batch.outputs["DIFFERENCE"], gathered["A"] - gathered["B"])
    assert len(gpu.cuda.allocations) == 4


def test_only_what_was_asked_for_is_copied_back(gpu: Machine) -> None:
    assert list(run(gpu.load(), ("SUM",), A=floats(1), B=floats(1))) == ["SUM"]
    assert gpu.cuda.copied[MemcpyKind.cudaMemcpyDeviceToHost] == 1


@pytest.mark.parametrize(
    ("profiles", "rows", "match"),
    [
        ("", 5, "between 1 and 4 but received 5"),
        ('instance_group { name: "m_0" profile: "1" }', 4, "between 5 and 8 but received 4"),
        ('instance_group { name: "m_0" profile: ["0", "1"] }', 9, "between 1 and 4 but received 9"),
    ],
)
def test_shapes_outside_the_profile_are_the_callers_fault(gpu: Machine, profiles: str, rows: int, match: str) -> None:
    text = (
        "request specifies invalid shape for input 'A'. Error details: model expected the shape of dimension 0 to be "
    )
    with pytest.raises(InvalidRequestError, match=text + match):
        run(gpu.load(profiles), A=floats(rows), B=floats(rows))


def test_the_profile_that_fits_is_taken(gpu: Machine) -> None:
    instance = gpu.load('instance_group { name: "m_0" profile: ["0", "1"] }')
    for rows in (3, 7):
        assert run(instance, A=floats(rows), B=floats(rows))["SUM"].shape == (rows, 4)


def test_a_profile_that_does_not_exist(gpu: Machine) -> None:
    with pytest.raises(ValueError, match="instance group 'm_0' has the profile '2'; the engine has 0 to 1"):
        gpu.load('instance_group { name: "m_0" profile: "2" }')


def test_another_rank_is_the_callers_fault(gpu: Machine) -> None:
    with pytest.raises(InvalidRequestError, match="model expected 2 dimensions but received 1"):
        run(gpu.load(), A=floats(1)[0], B=floats(1))


def test_instances_of_a_device_share_an_engine(gpu: Machine) -> None:
    backend, config = TensorRTBackend({}), model_config("max_batch_size: 2")
    backend.auto_complete(config, gpu.folder)
    gpu.tensorrt.deserialised = 0
    model = backend.load_model(model_context(config, gpu.folder))
    for number, device_id in enumerate((0, 0, 1)):
        model.load_instance(InstanceContext(name=f"m_0_{number}", kind="GPU", device_id=device_id))
    assert gpu.tensorrt.deserialised == 2
    assert gpu.cuda.streams == 3


def test_every_execution_runs_on_its_device(gpu: Machine) -> None:
    instance = gpu.load(device_id=3)
    gpu.cuda.devices.clear()
    run(instance, A=floats(1), B=floats(1))
    assert gpu.cuda.devices == [3]


def test_unloading_gives_everything_back(gpu: Machine) -> None:
    instance = gpu.load()
    run(instance, A=floats(1), B=floats(1))
    instance.unload()
    assert (gpu.cuda.allocations, gpu.cuda.streams) == ({}, 0)


def test_too_little_memory_fails_the_request_and_not_the_next(gpu: Machine) -> None:
    instance = gpu.load()
    gpu.cuda.free_memory = 16
    with pytest.raises(EngineError, match="cudaMalloc failed: out of memory"):
        run(instance, A=floats(2), B=floats(2))
    assert run(instance, A=floats(1), B=floats(1))["SUM"].shape == (1, 4)


def test_an_engine_without_variable_dimensions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shapes = {"inputs": {"A": (2, 4), "B": (2, 4)}, "outputs": {"SUM": (2, 4), "DIFFERENCE": (2, 4)}}
    fixed = machine(monkeypatch, tmp_path, **shapes, profiles=[profile(2, 2)])
    assert run(fixed.load(), A=floats(2), B=floats(2))["SUM"].shape == (2, 4)
    with pytest.raises(InvalidRequestError, match="dimension 0 to be between 2 and 2 but received 1"):
        run(fixed.load(), A=floats(1), B=floats(1))


def test_an_output_whose_shape_depends_on_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    instance = machine(monkeypatch, tmp_path, outputs={"SUM": (-1, -1), "DIFFERENCE": (-1, 4)}).load()
    with pytest.raises(UnsupportedError, match="the shape of output 'SUM' depends on the data"):
        run(instance, A=floats(1), B=floats(1))


@pytest.mark.parametrize(
    ("engine", "config", "match"),
    [
        ({}, "max_batch_size: 9", "max_batch_size 9 is above the engine's 8"),
        ({}, 'default_model_filename: "../1/model.plan"', "leads out of the model's folder"),
        ({}, 'default_model_filename: "other.plan"', "unable to find '1/other.plan' for model 'm'"),
        ({"shape_tensors": frozenset("A")}, "", "'A' is a shape tensor, which is not supported"),
        ({"formats": {"A": TensorFormat.CHW32}}, "", "'A' has no linear format"),
        ({"dtype": DataType.FP8}, "", "'A' is a FP8, which no request can carry"),
        ({"memory_for_contexts": 0}, "", "an execution context cannot be created"),
    ],
)
def test_what_cannot_be_is_refused_at_loading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: dict[str, Any], config: str, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        machine(monkeypatch, tmp_path, **engine).load(config)


def test_a_plan_of_another_version(gpu: Machine) -> None:
    (gpu.folder / "model.plan").write_bytes(b"of another version")
    with pytest.raises(
        ValueError, match=r"'model.plan' cannot be loaded: it was built with another version of TensorRT"
    ):
        gpu.load()


def test_an_instance_on_a_cpu(gpu: Machine) -> None:
    with pytest.raises(ValueError, match="instance 'm_0_0' of model 'm' must be KIND_GPU"):
        gpu.load(kind="CPU")


@pytest.mark.parametrize("module", ["tensorrt", "cuda.bindings.runtime"])
def test_without_the_packages_the_extra_is_named(gpu: Machine, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ValueError, match=rf"need the package {module} .*pip install 'penstock-server\[tensorrt\]' cuda-python"
    ):
        gpu.load()


def test_an_old_tensorrt(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInTensorRT, "__version__", "8.6.1")
    with pytest.raises(ValueError, match=r"TensorRT 8\.6\.1 is too old: 10 or newer is needed"):
        gpu.load()


def test_the_stand_in_has_the_signatures_of_cuda_python() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    for name in vars(StandInCudaRuntime):
        if name.startswith("cuda"):
            assert hasattr(runtime, name), name
    for kind in MemcpyKind:
        assert getattr(runtime.cudaMemcpyKind, kind.name).value == kind.value


async def test_requests_of_different_shapes_in_one_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def last(arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {"LAST": arrays["R"][arrays["ENDS"].astype(int) - 1][:, None]}

    shapes = {"ENDS": ((1,), (2,), (4,)), "R": ((1,), (8,), (99,))}
    engine = {"inputs": {"ENDS": (-1,), "R": (-1,)}, "outputs": {"LAST": (-1, 1)}, "compute": last}
    gpu = machine(monkeypatch, tmp_path, profiles=[shapes], **engine)
    config = model_config("""max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 30000000 }
        input { name: "R" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "LAST" data_type: TYPE_FP32 dims: [ 1 ] } instance_group { kind: KIND_GPU gpus: 0 }
        batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ENDS" data_type: TYPE_FP32 source_input: "R" }
    """)
    monkeypatch.setattr(instances, "visible_gpus", lambda: 1)
    model = await load_model(model_context(config, gpu.folder), TensorRTBackend({}))
    rows = [[[1.0, 2.0, 3.0]], [[4.0]], [[5.0, 6.0]], [[7.0]]]
    answers = await asyncio.gather(*(model.infer(request(R=np.array(row, np.float32))) for row in rows))
    await model.stop()
    assert [output(answer, "LAST").item() for answer in answers] == [3, 4, 6, 7]
    assert model.statistics.execution_count == 1
