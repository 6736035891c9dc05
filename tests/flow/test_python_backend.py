"""Models in processes of their own: what `execute` is given and what becomes of its answers."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.classic.messages import InferRequest
from penstock.classic.python import session
from penstock.classic.python.worker.wire import encode_strings
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, NotFoundError, PenstockError
from penstock.gateway.requests.context import RequestContext
from support.python_backend import ADD_SUB, ADD_SUB_CONFIG, CPU, instances, loaded, outputs, request

ANY = f"""
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_STRING dims: [ -1 ] }} ]
{CPU}
"""
X = np.array([1, 2], np.float32)


def says(body: str, extra: str = "") -> str:
    """A model whose output Y is what the expression says of the request `r` and its tensor `x`."""
    return f"""
class TritonPythonModel:
    {extra or "pass"}
    def execute(self, requests):
        responses = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "X")
            y = repr({body}).encode()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([y], np.object_))]))
        return responses
"""


async def asked(folder: Path, body: str, extra: str = "", **about: Any) -> Any:
    async with loaded(folder, says(body, extra), ANY) as model:
        response = await model.infer(request(X=X, **about))
        return eval(outputs(response)["Y"][0])  # the repr of what the model has made


@pytest.mark.parametrize("batching", ["", "max_batch_size: 4 dynamic_batching { }"])
async def test_a_model_without_inputs(tmp_path: Path, batching: str) -> None:
    config = f'output {{ name: "Y" data_type: TYPE_STRING dims: [ -1 ] }} {CPU} {batching}'
    async with loaded(tmp_path, says("[t.name() for t in r.inputs()]"), config) as model:
        responses = await asyncio.gather(*(model.infer(request()) for _ in range(3)))
        with pytest.raises(InvalidRequestError, match="expected 0 inputs but got 1 inputs for model 'm'"):
            await model.infer(request(X=X))
    assert [outputs(response)["Y"].tolist() for response in responses] == [[b"[]"]] * 3


async def test_a_model_without_outputs(tmp_path: Path) -> None:
    config = f'input {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }} {CPU}'
    async with loaded(tmp_path, says("x"), config) as model:
        response = await model.infer(request(X=X))
        assert (response.outputs, response.error) == ([], None)
        with pytest.raises(InvalidRequestError, match="unexpected inference output 'Y' for model 'm'"):
            await model.infer(InferRequest(inputs=request(X=X).inputs, outputs=("Y",)))


async def test_an_instance_of_a_model_that_places_itself(tmp_path: Path) -> None:
    told = "(self.args['model_instance_kind'], self.args['model_instance_device_id'])"
    code = says(told, "def initialize(self, args): self.args = args")
    async with loaded(tmp_path, code, ANY.replace(CPU, "instance_group { kind: KIND_MODEL }")) as model:
        assert eval(outputs(await model.infer(request(X=X)))["Y"][0]) == ("MODEL", "0")


async def test_a_batch_is_a_list_of_requests(tmp_path: Path) -> None:
    async with loaded(tmp_path, ADD_SUB) as model:
        arrays = [np.full((1, 16), index, np.float32) for index in range(40)]
        responses = await asyncio.gather(*(model.infer(request(INPUT0=a, INPUT1=arrays[1])) for a in arrays))
    for index, response in enumerate(responses):
        assert [tensor.name for tensor in response.outputs or ()] == ["OUTPUT0", "OUTPUT1"]
        np.testing.assert_array_equal(outputs(response)["OUTPUT0"], np.full((1, 16), index + 1, np.float32))
        np.testing.assert_array_equal(outputs(response)["OUTPUT1"], np.full((1, 16), index - 1, np.float32))
    assert model.statistics.inference_count == 40
    assert model.statistics.execution_count < 40


async def test_many_strings_are_encoded_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of them, which one request may have, would hold up all other requests for seconds."""
    threads: list[int] = []

    def noted(array: Any) -> bytes:
        threads.append(threading.get_ident())
        return encode_strings(array)

    monkeypatch.setattr(session, "encode_strings", noted)
    strings = np.array([b"%d" % number for number in range(1 << 14)], np.object_)
    async with loaded(
        tmp_path, says("[len(x.as_numpy()), x.as_numpy()[-1]]"), ANY.replace("TYPE_FP32", "TYPE_STRING")
    ) as model:
        response = await model.infer(request(X=strings))
    assert eval(outputs(response)["Y"][0]) == [1 << 14, b"16383"]
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


async def test_initialize_gets_strings_and_finalize_runs(tmp_path: Path) -> None:
    extra = f"""
    def initialize(self, args):
        self.args = args
    def finalize(self):
        open({str(tmp_path / "done")!r}, "w").write("finalized")"""
    args = await asked(tmp_path, "self.args", extra)
    config = json.loads(args.pop("model_config"))
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_name": "m",
    }
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert (tmp_path / "done").read_text() == "finalized"


async def test_what_a_request_tells(tmp_path: Path) -> None:
    body = (
        "(r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(), r.requested_output_names(), "
        "r.is_cancelled(), type(r.trace()).__name__, [t.name() for t in r.inputs()])"
    )
    assert await asked(tmp_path, body) == ("", 0, 0, 0, "{}", {"Y"}, False, "InferenceTrace", ["X"])
    found = await asked(
        tmp_path / "more",
        body,
        _id="7",
        _correlation_id="seq",
        _sequence_start=True,
        _sequence_end=True,
        _timeout_us=90,
        _parameters={"a": "b", "n": 3, "t": True, "f": 0.5},
        _outputs=("Y",),
    )
    assert found[:4] == ("7", "seq", 3, 90)
    assert found[4] == '{"a":"b","n":3,"t":true,"f":0.5}'
    assert found[5] == {"Y"}


async def test_the_span_that_a_request_belongs_to(tmp_path: Path) -> None:
    """As headers: so a model can hang spans of its own below it."""
    span = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    context = await asked(tmp_path / "traced", "r.trace().get_context()", _caller=RequestContext(traceparent=span))
    assert json.loads(context) == {"traceparent": span}
    assert await asked(tmp_path / "not", "r.trace().get_context()", _caller=RequestContext()) is None


async def test_what_a_tensor_tells(tmp_path: Path) -> None:
    body = (
        "(x.name(), x.shape(), x.triton_dtype(), x.is_cpu(), x.as_numpy().flags.writeable, str(x.as_numpy().dtype), "
        "x.__dlpack_device__(), type(x.to_dlpack()).__name__)"
    )
    assert await asked(tmp_path, body) == ("X", [2], 11, True, True, "float32", (1, 0), "PyCapsule")


async def test_only_requested_outputs_come_back(tmp_path: Path) -> None:
    async with loaded(tmp_path, ADD_SUB) as model:
        array = np.ones((2, 16), np.float32)
        found = await model.infer(request(INPUT0=array, INPUT1=array, _outputs=("OUTPUT1",)))
    assert list(outputs(found)) == ["OUTPUT1"]


async def test_response_parameters(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([], parameters={"a": 1, "b": "x", "c": True}) for r in requests]
"""
    async with loaded(tmp_path, code, ANY) as model:
        assert (await model.infer(request(X=X))).parameters == {"a": 1, "b": "x", "c": True}


IDENTITY = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor.from_dlpack("Y", t) if t.triton_dtype() == 14 else pb_utils.Tensor("Y", t.as_numpy())
                for t in r.inputs()
            ])
            for r in requests
        ]
"""


@pytest.mark.parametrize(
    "datatype",
    "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BF16 BYTES".split(),  # noqa: SIM905
)
async def test_every_datatype_there_and_back(tmp_path: Path, datatype: str) -> None:
    kind = "STRING" if datatype == "BYTES" else datatype
    config = f"""
max_batch_size: 0
input [ {{ name: "X" data_type: TYPE_{kind} dims: [ -1, 2 ] }} ]
output [ {{ name: "Y" data_type: TYPE_{kind} dims: [ -1, 2 ] }} ]
{CPU}
"""
    async with loaded(tmp_path, IDENTITY, config) as model:
        for count in (0, 1, 5, 40_000):
            array = numbered(datatype, count)
            found = await model.infer(InferRequest(inputs={"X": Tensor("X", datatype, array)}))
            [tensor] = found.outputs or ()
            assert tensor.datatype == datatype
            assert tensor.array.dtype == array.dtype
            assert tensor.array.shape == array.shape
            np.testing.assert_array_equal(tensor.array, array)


def numbered(datatype: str, count: int) -> np.ndarray:
    """[count, 2]"""
    numbers = np.arange(count * 2).reshape(count, 2)
    if datatype == "BYTES":
        array = np.empty((count, 2), np.object_)
        array.ravel()[:] = [b"\x00\xff" * (number % 7) for number in range(count * 2)]
        return array
    if datatype == "BF16":
        return numbers.astype(ml_dtypes.bfloat16)
    names = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BOOL": "bool"}
    return (numbers % 100).astype(names.get(datatype, datatype.lower()))


async def test_text_becomes_utf8(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        y = np.array(["ä", b"b", 3], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y), pb_utils.Tensor("Z", np.array([b"s", b"tt"]))])]
"""
    config = ANY + ' output [ { name: "Z" data_type: TYPE_STRING dims: [ -1 ] } ]'
    async with loaded(tmp_path, code, config) as model:
        found = outputs(await model.infer(request(X=X)))
    assert found["Y"].tolist() == ["ä".encode(), b"b", b"3"]
    assert found["Z"].tolist() == [b"s", b"tt"]


async def test_arrays_that_the_model_keeps_stay_as_they_are(tmp_path: Path) -> None:
    """Large tensors lie in shared memory, which is used again only when no array over it is left."""
    code = """
class TritonPythonModel:
    kept = []
    def execute(self, requests):
        for r in requests:
            self.kept.append(pb_utils.get_input_tensor_by_name(r, "X").as_numpy()[::2])
        y = np.array([float(a[0]) for a in self.kept if (a == a[0]).all()], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])] * len(requests)
"""
    config = ANY.replace("TYPE_STRING", "TYPE_FP32")
    async with loaded(tmp_path, code, config) as model:
        for number in range(6):
            found = outputs(await model.infer(request(X=np.full(50_000, number, np.float32))))
        assert found["Y"].tolist() == [0, 1, 2, 3, 4, 5]
        [instance] = instances(model)
        assert instance._session._link.outbox.used >= 6 * 200_000


async def test_responses_that_the_caller_keeps_stay_as_they_are(tmp_path: Path) -> None:
    config = ANY.replace("TYPE_STRING", "TYPE_FP32")
    code = """
class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        x += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])]
"""
    async with loaded(tmp_path, code, config) as model:
        kept = [outputs(await model.infer(request(X=np.full(50_000, n, np.float32))))["Y"] for n in range(5)]
        assert [float(array[0]) for array in kept] == [1, 2, 3, 4, 5]
        assert all((array == array[0]).all() for array in kept)


async def test_shared_memory_is_used_again(tmp_path: Path) -> None:
    config = ANY.replace("TYPE_STRING", "TYPE_FP32")
    async with loaded(tmp_path, IDENTITY, config, options={"shm-default-byte-size": "4194304"}) as model:
        for number in range(15):
            await model.infer(request(X=np.full(250_000, number, np.float32)))
            gc.collect()  # blocks are given back with the last array over them
        [instance] = instances(model)
        link = instance._session._link
        assert link.outbox.size <= 8 * 2**20
        assert link.inbox._size <= 8 * 2**20


async def test_a_response_that_cannot_be_sent_keeps_no_shared_memory(tmp_path: Path) -> None:
    """Halves of surrogate pairs, which json.loads gives for what a client has written, are no text for others."""
    code = """
class TritonPythonModel:
    def execute(self, requests):
        large, text = np.zeros(250_000, np.float32), np.array(["\\ud800"], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", large), pb_utils.Tensor("T", text)]) for r in requests]
"""
    config = ANY.replace("TYPE_STRING", "TYPE_FP32") + 'output [ { name: "T" data_type: TYPE_STRING dims: [ -1 ] } ]'
    async with loaded(tmp_path, code, config, options={"shm-default-byte-size": "4194304"}) as model:
        for _ in range(15):
            with pytest.raises(PenstockError, match="surrogates not allowed"):
                await model.infer(request(X=np.ones(1, np.float32)))
        [instance] = instances(model)
        assert instance._session._link.inbox._size <= 8 * 2**20


async def test_reshaped_tensors_come_and_go_in_the_shape_that_the_model_wants(tmp_path: Path) -> None:
    config = f"""
max_batch_size: 4
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] reshape: {{ shape: [ ] }} }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] reshape: {{ shape: [ ] }} }} ]
{CPU}
"""
    code = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = [r.inputs()[0].as_numpy() for r in requests]
        if any(a.ndim != 1 for a in arrays):
            raise ValueError(str([a.shape for a in arrays]))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", a * 2)]) for a in arrays]
"""
    async with loaded(tmp_path, code, config) as model:
        found = outputs(await model.infer(request(X=np.ones((3, 1), np.float32))))
    assert found["Y"].tolist() == [[2], [2], [2]]


async def test_execute_may_be_a_coroutine_and_keeps_its_loop(tmp_path: Path) -> None:
    code = """
import asyncio
class TritonPythonModel:
    def initialize(self, args):
        self.lock = asyncio.Lock()
    async def execute(self, requests):
        async def one(r):
            async with self.lock:
                await asyncio.sleep(0)
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([b"done"], np.object_))])
        return await asyncio.gather(*(one(r) for r in requests))
"""
    async with loaded(tmp_path, code, ANY) as model:
        assert outputs(await model.infer(request(X=X)))["Y"].tolist() == [b"done"]
        assert outputs(await model.infer(request(X=X)))["Y"].tolist() == [b"done"]


BLAME = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy()
            if x[0, 0] == 13:
                raise ValueError("thirteen")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
        return responses
"""


async def test_only_the_request_that_raises_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with loaded(tmp_path, BLAME) as model:
        calls = [
            model.infer(request(INPUT0=np.full((1, 16), index, np.float32), INPUT1=np.ones((1, 16), np.float32)))
            for index in range(32)
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [index for index, one in enumerate(found) if isinstance(one, Exception)] == [13]
    failure = found[13]
    assert type(failure) is EngineError
    assert failure.message == "Failed to process the request(s) for model 'm_0_0', message: ValueError: thirteen"
    assert all(outputs(one)["OUTPUT0"][0, 0] == i for i, one in enumerate(found) if not isinstance(one, Exception))
    assert "model.py" in caplog.text  # the traceback, for the operator only


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("return None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        ("return 3", "Expected a list in the execute return, found type '<class 'int'>'."),
        ("return []", "Number of InferenceResponse objects do not match the number of InferenceRequest objects."),
        ("return ['a']", "Expected an 'InferenceResponse' object in the execute function return list, found type"),
        ("return [None]", "found None for a request whose response sender was not used"),
        ("raise pb_utils.TritonModelException('why')", "message: TritonModelException: why"),
        ("raise KeyError('k')", "message: KeyError: 'k'"),
        ("pb_utils.Tensor('', np.ones(1))", "TritonModelException: Tensor name cannot be an empty string."),
        ("pb_utils.Tensor('t', np.array(['a']))", 'NumPy dtype "<U1" is not supported.'),
        ("pb_utils.Tensor('t', np.zeros(1, 'c8'))", 'NumPy dtype "complex64" is not supported.'),
        ("requests[0].set_release_flags(2)", "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model"),
        ("requests[0].exec()", "cannot be executed"),
    ],
)
async def test_wrong_answers(tmp_path: Path, code: str, text: str) -> None:
    body = f"class TritonPythonModel:\n    def execute(self, requests):\n        {code}\n"
    async with loaded(tmp_path, body, ANY) as model:
        with pytest.raises(EngineError) as caught:
            await model.infer(request(X=X))
        assert text in caught.value.message
        assert caught.value.message.startswith("Failed to process the request(s) for model 'm_0_0', message: ")
        assert str(tmp_path) not in caught.value.message
        assert model.ready


@pytest.mark.parametrize(
    ("code", "error", "name"),
    [
        ("NOT_FOUND", NotFoundError, "not_found"),
        ("INVALID_ARG", InvalidRequestError, "invalid_request"),
        ("INTERNAL", EngineError, "engine_error"),
        ("UNKNOWN", PenstockError, "unknown"),
        ("UNAVAILABLE", PenstockError, "overloaded"),
        ("UNSUPPORTED", PenstockError, "unsupported_parameter"),
        ("ALREADY_EXISTS", PenstockError, "already_exists"),
        ("CANCELLED", PenstockError, "cancelled"),
    ],
)
async def test_errors_of_one_response(tmp_path: Path, code: str, error: type[PenstockError], name: str) -> None:
    body = f"""
class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("why", pb_utils.TritonError.{code})
        assert error.message() == "why" and error.code() == pb_utils.TritonError.{code}
        return [pb_utils.InferenceResponse(error=error) for r in requests]
"""
    async with loaded(tmp_path, body, ANY) as model:
        with pytest.raises(error, match=r"^why$") as caught:
            await model.infer(request(X=X))
    assert caught.value.code == name


async def test_what_a_model_prints_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report server#4481: in the locale of a container a Chinese word is an exception of the model."""
    monkeypatch.setenv("LC_ALL", "C")
    caplog.set_level(logging.DEBUG)
    extra = """
    def initialize(self, args):
        import sys
        print("to stdout")
        print("\\u4e2d\\u6587")
        print("to stderr\\x1b[2J", file=sys.stderr)
        pb_utils.Logger.log_info("info")
        pb_utils.Logger.log_warn("warn")
        pb_utils.Logger.log_error("error")
        pb_utils.Logger.log_verbose("verbose")
        pb_utils.Logger.log("plain", pb_utils.Logger.WARNING)
        try: pb_utils.Logger.log("lost", 9)
        except TypeError: print("refused")"""
    await asked(tmp_path, "0", extra)
    found = {(record.levelname, record.message) for record in caplog.records if record.name == "penstock.models.m_0_0"}
    assert found >= {
        ("INFO", "to stdout"),
        ("INFO", "中文"),
        ("INFO", "to stderr�[2J"),
        ("INFO", "info"),
        ("WARNING", "warn"),
        ("ERROR", "error"),
        ("DEBUG", "verbose"),
        ("WARNING", "plain"),
        ("INFO", "refused"),
    }


async def test_modules_beside_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "relative.py").write_text("NAME = 'relative'\n")
    (tmp_path / "m" / "above.py").write_text("NAME = 'above'\n")
    extra = "import beside, above\n    from .relative import NAME"
    assert await asked(tmp_path, "(self.beside.NAME, self.above.NAME, self.NAME)", extra) == (
        "beside",
        "above",
        "relative",
    )


async def test_nothing_is_written_to_the_repository(tmp_path: Path) -> None:
    await asked(tmp_path, "0")
    assert [path.name for path in (tmp_path / "m").rglob("*") if path.is_file()] == ["model.py"]


async def test_the_process_is_lean(tmp_path: Path) -> None:
    """It shares nothing with the server but a few files."""
    body = """sorted(name for name in __import__("sys").modules if name.split(".")[0] in
        ("penstock", "openvino", "zmq", "torch", "starlette", "google", "grpc", "tritonclient"))"""
    assert await asked(tmp_path, body) == []


async def test_processes_of_the_model_find_the_module(tmp_path: Path) -> None:
    """multiprocessing.spawn runs the main file again in the new process."""
    code = """
import multiprocessing
def work(number):
    import triton_python_backend_utils
    return triton_python_backend_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL + number
class TritonPythonModel:
    def execute(self, requests):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            y = np.array([str(pool.apply(work, (2,)))], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])]
"""
    async with loaded(tmp_path, code, ANY) as model:
        assert outputs(await model.infer(request(X=X)))["Y"].tolist() == [b"3"]


async def test_instances_are_processes(tmp_path: Path) -> None:
    config = ADD_SUB_CONFIG.replace("kind: KIND_CPU", "kind: KIND_CPU count: 2")
    async with loaded(tmp_path, ADD_SUB, config) as model:
        pids = {instance.pid for instance in instances(model)}
    assert len(pids) == 2


async def test_an_output_that_does_not_fit_its_reshape_ends_its_request_only(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        shape = (2,) if requests[0].request_id() == "good" else (2, 1, 1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(shape, np.float32))])]
"""
    config = f"""
max_batch_size: 4
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] reshape {{ shape: [ ] }} }} ]
{CPU}
"""
    inputs = {"X": Tensor("X", "FP32", np.zeros((2, 1), np.float32))}
    async with loaded(tmp_path, code, config) as model:
        with pytest.raises(EngineError, match="does not fit its reshape"):
            await model.infer(InferRequest(inputs=inputs))
        found = outputs(await model.infer(InferRequest(inputs=inputs, id="good")))
    assert found["Y"].shape == (2, 1)
