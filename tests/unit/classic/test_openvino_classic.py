"""The openvino backend: what the conformance suite does not ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from backend_candidates.candidate import LOOKUP, lookup_answer, lookup_rows
from backend_candidates.openvino import lookup, strings, write_ir
from penstock.classic.base import BackendInstance
from penstock.classic.openvino.backend import OpenVINOBackend
from penstock.classic.openvino.options import options
from penstock.classic.tensors import NUMPY_TYPES
from penstock.engines.errors import InvalidRequestError
from support.backends import RecordedBatch, RecordedCall, load, model_config, model_context, run
from support.tensorflow_files import graph_def, saved_model


def loaded(folder: Path, model: ov.Model, text: str) -> BackendInstance:
    write_ir(folder / "m" / "1", model)
    return load(OpenVINOBackend({}), model_config(text), folder / "m" / "1")


def parameters(**values: str) -> str:
    return "".join(f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in values.items())


def identity(shape: list[int], kind: Any = np.float32) -> ov.Model:
    given = op.parameter(shape, kind, name="X")
    given.output(0).set_names({"X"})
    result = op.result(given)
    result.output(0).set_names({"Y"})
    return ov.Model([result], [given], "identity")


def rows(count: int) -> dict[str, np.ndarray[Any, Any]]:
    return dict(lookup_rows(np.random.default_rng(0), count))


@pytest.mark.parametrize(("kind", "datatype"), [(np.float32, "FP32"), (ov.Type.bf16, "BF16"), (np.int64, "INT64")])
def test_a_scalar_is_written_as_one_element(tmp_path: Path, kind: Any, datatype: str) -> None:
    instance = loaded(tmp_path, identity([], kind), "")
    found = run(instance, X=np.array([3], NUMPY_TYPES[datatype]))["Y"]
    assert (found.shape, found.dtype, float(found[0])) == ((1,), NUMPY_TYPES[datatype], 3)


def test_a_fixed_batch_becomes_a_variable_one(tmp_path: Path) -> None:
    instance = loaded(tmp_path, lookup(3, batch=1), LOOKUP)
    for count in (1, 5, 8):
        np.testing.assert_array_equal(run(instance, **rows(count))["OUTPUT0"], lookup_answer(rows(count), 3)["OUTPUT0"])


def test_a_batch_of_one_size_is_filled_up_where_that_is_asked_for(tmp_path: Path) -> None:
    fixed = LOOKUP + parameters(SKIP_OV_DYNAMIC_BATCHSIZE="YES")
    instance = loaded(tmp_path, lookup(2, batch=8), fixed)
    assert run(instance, **rows(8))["OUTPUT0"].shape == (8, 4)
    with pytest.raises(InvalidRequestError, match="takes batches of 8 only, and this one has 3"):
        run(instance, **rows(3))
    padded = loaded(tmp_path, lookup(2, batch=8), fixed + parameters(ENABLE_BATCH_PADDING="YES"))
    found = run(padded, **rows(3))
    np.testing.assert_array_equal(found["OUTPUT0"], lookup_answer(rows(3), 2)["OUTPUT0"])


def test_every_input_that_is_filled_up_lasts_until_it_has_been_read(tmp_path: Path) -> None:
    names = "ABC"
    given = [op.parameter([8, 50_000], np.float32, name=name) for name in names]
    for port, name in zip(given, names, strict=True):
        port.output(0).set_names({name})
    result = op.result(op.add(op.add(given[0], given[1]), given[2]))
    result.output(0).set_names({"Y"})
    tensors = "".join(f'input {{ name: "{name}" data_type: TYPE_FP32 dims: 50000 }}' for name in names)
    text = f'max_batch_size: 8 {tensors} output {{ name: "Y" data_type: TYPE_FP32 dims: 50000 }}'
    more = parameters(SKIP_OV_DYNAMIC_BATCHSIZE="YES", ENABLE_BATCH_PADDING="YES")
    instance = loaded(tmp_path, ov.Model([result], given, "m"), text + more)
    arrays = {name: np.full((3, 50_000), 10.0**place, np.float32) for place, name in enumerate(names)}
    assert np.unique(run(instance, **arrays)["Y"]).tolist() == [111]


def test_a_loaded_model_does_not_depend_on_its_files(tmp_path: Path) -> None:
    """Weights that are read from the file at each request end the process when the file becomes shorter."""
    given = op.parameter([-1], np.int64, name="X")
    given.output(0).set_names({"X"})
    table = np.arange(100_000, dtype=np.float32).reshape(-1, 10)
    result = op.result(op.gather(table, given, np.int64(0)))
    result.output(0).set_names({"Y"})
    instance = loaded(tmp_path, ov.Model([result], [given], "m"), "")
    path = tmp_path / "m" / "1" / "model.bin"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))  # of the same length: what is wrong is only another answer
    np.testing.assert_array_equal(run(instance, X=np.array([9_000]))["Y"], table[[9_000]])


def test_inputs_take_the_configured_dims_where_that_is_asked_for(tmp_path: Path) -> None:
    text = """
        input { name: "X" data_type: TYPE_FP32 dims: [ 3, 2 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 3, 2 ] }
    """
    with pytest.raises(ValueError, match="the model expects 2 dimensions"):
        loaded(tmp_path, identity([1, 4]), text)
    instance = loaded(tmp_path, identity([1, 4]), text + parameters(RESHAPE_IO_LAYOUTS="YES"))
    assert run(instance, X=np.ones((3, 2), np.float32))["Y"].shape == (3, 2)


def test_a_model_that_cannot_batch_is_refused(tmp_path: Path) -> None:
    given = op.parameter([1, 4], np.float32, name="X")
    model = ov.Model([op.result(op.reshape(given, np.array([2, 2]), False))], [given], "m")
    with pytest.raises(ValueError, match=r"does not support batches of any size|cannot have the configured shapes"):
        loaded(tmp_path, model, "max_batch_size: 4")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (ov.Type.bf16, ml_dtypes.bfloat16),
        (ov.Type.f16, np.float16),
        (ov.Type.f64, np.float64),
        (ov.Type.i64, np.int64),
        (ov.Type.u8, np.uint8),
        (ov.Type.boolean, np.bool_),
    ],
)
def test_types_come_back_as_they_went_in(tmp_path: Path, kind: Any, dtype: Any) -> None:
    instance = loaded(tmp_path, identity([-1, 2], kind), "")
    array = np.array([[0, 1], [1, 3]]).astype(dtype)
    found = run(instance, X=array)["Y"]
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_what_was_read_from_the_network_is_taken_as_it_is(tmp_path: Path) -> None:
    instance = loaded(tmp_path, identity([-1, 2]), "")
    array = np.frombuffer(np.ones((3, 2), np.float32).tobytes(), np.float32).reshape(3, 2)
    np.testing.assert_array_equal(run(instance, X=array)["Y"], array)


def test_an_answer_is_not_the_memory_of_the_next_one(tmp_path: Path) -> None:
    instance = loaded(tmp_path, lookup(1), LOOKUP)
    first = run(instance, **rows(2))["OUTPUT1"]
    kept = first.copy()
    run(instance, **{name: array * 0 for name, array in rows(2).items()})
    np.testing.assert_array_equal(first, kept)


def test_state_does_not_pass_from_request_to_request(tmp_path: Path) -> None:
    given = op.parameter([1], np.float32, name="X")
    given.output(0).set_names({"X"})
    variable = op.read_value(op.constant(np.zeros(1, np.float32)), "total")
    total = op.add(given, variable)
    result = op.result(total)
    result.output(0).set_names({"Y"})
    instance = loaded(tmp_path, ov.Model([result], [op.assign(total, "total")], [given], "m"), "")
    assert [run(instance, X=np.ones(1, np.float32))["Y"].tolist() for _ in range(3)] == [[1], [1], [1]]


def test_strings_that_cannot_be_passed_are_refused_before_they_cost_memory(tmp_path: Path) -> None:
    instance = loaded(tmp_path, strings(), "max_batch_size: 0")
    for items, told in (
        ([b"x" * 1_000_000, *[b""] * 999], "too many for the length of its longest one"),
        ([b"x\0", b""], "ends with a zero byte"),
    ):
        array = np.empty(len(items), np.object_)
        array[:] = items
        with pytest.raises(InvalidRequestError, match=told):
            run(instance, INPUT0=array.reshape(-1, 2))


def test_what_a_request_did_not_ask_for_is_not_copied(tmp_path: Path) -> None:
    instance = loaded(tmp_path, lookup(1), LOOKUP)
    batch = RecordedBatch(RecordedCall(rows(1), ("OUTPUT1",)), RecordedCall(rows(2), ("OUTPUT1",)))
    instance.execute(batch)
    assert list(batch.outputs) == ["OUTPUT1"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"CPU_EXTENSION_PATH": "/x.so"}, "'CPU_EXTENSION_PATH' is not supported: libraries"),
        ({"COMPILED_CACHE_DIR": "/x"}, "--backend-config=openvino,cache-dir"),
        ({"TARGET_DEVICE": "TPU"}, "'TARGET_DEVICE' is 'TPU'; this machine has AUTO, CPU"),
        ({"PERFORMANCE_HINT": "FAST"}, "must be one of LATENCY"),
        ({"INFERENCE_NUM_THREADS": "100000"}, "'INFERENCE_NUM_THREADS' must be at most 1024 threads, not 100000"),
        ({"NUM_STREAMS": "many"}, "'NUM_STREAMS' must be a whole number"),
    ],
)
def test_parameters_that_cannot_be_are_named(values: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        options(model_config(parameters(**values)), {})


def test_instances_share_the_threads_and_have_a_stream_each(tmp_path: Path) -> None:
    config = model_config(LOOKUP + "instance_group { count: 3 }")
    found = options(config, {"cache-dir": "/var/cache"}).properties
    assert (found["NUM_STREAMS"], found["CACHE_DIR"]) == (3, "/var/cache")
    earlier = options(model_config(parameters(CPU_THREADS_NUM="5", CPU_THROUGHPUT_STREAMS="auto")), {}).properties
    assert (earlier["INFERENCE_NUM_THREADS"], earlier["NUM_STREAMS"]) == (5, "AUTO")
    write_ir(tmp_path / "m" / "1", lookup(1))
    model = OpenVINOBackend({}).load_model(model_context(config, tmp_path / "m" / "1"))
    assert model._compiled.get_property("NUM_STREAMS") == min(3, found["INFERENCE_NUM_THREADS"])


@pytest.mark.parametrize("file", ["model.graphdef", "model.pb", "model.savedmodel/saved_model.pb"])
def test_tensorflow_s_files(tmp_path: Path, file: str) -> None:
    path = tmp_path / "m" / "1" / file
    path.parent.mkdir(parents=True)
    is_saved = path.name == "saved_model.pb"
    path.write_bytes(saved_model() if is_saved else graph_def())
    config = model_config()
    instance = load(OpenVINOBackend({}), config, tmp_path / "m" / "1")
    given, result = ("in", "out") if is_saved else ("X", "Y")
    assert (config.input[0].name, list(config.output[0].dims), config.max_batch_size) == (given, [2], 4)
    assert run(instance, **{given: np.ones((3, 2), np.float32)})[result].tolist() == [[2, 2]] * 3
