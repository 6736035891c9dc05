"""The dali backend: pictures of all sizes, programs that make pipelines, and configurations that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvidia.dali")

from penstock.classic.dali.backend import DaliBackend
from penstock.classic.tensors import Array
from penstock.engines.errors import InvalidRequestError
from support.backends import RecordedBatch, RecordedCall, load, model_config, run
from support.dali import decoder, png, scaled_picture

FILES = 'input { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }'
PICTURE = np.frombuffer(png(3, 2), np.uint8)


def pictures(*sizes: tuple[int, int]) -> Array:
    return np.array([[png(*size)] for size in sizes], np.object_)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.dali").write_bytes(decoder().serialize())
    return tmp_path


def test_a_pipeline_tells_what_it_takes_and_gives(folder: Path) -> None:
    config = model_config()
    instance = load(DaliBackend({}), config, folder)
    assert config.max_batch_size == 4
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in config.input] == [("IMAGE", 2, [-1])]
    assert [(tensor.data_type, list(tensor.dims)) for tensor in config.output] == [(2, [-1, -1, -1])]
    padded = np.stack([PICTURE, PICTURE])  # as Triton's clients send files of one length
    found = run(instance, IMAGE=padded)[config.output[0].name]
    assert found.shape == (2, 2, 3, 3)
    assert (found == [10, 20, 30]).all()


def test_requests_of_a_batch_may_have_pictures_of_other_sizes(folder: Path) -> None:
    instance = load(DaliBackend({}), model_config(FILES), folder)
    calls = [RecordedCall({"IMAGE": pictures((5, 4), (5, 4))}), RecordedCall({"IMAGE": pictures((3, 6))})]
    instance.execute(RecordedBatch(*calls))
    shapes = [tensor.array.shape for call in calls for tensor in call.responses[0].outputs or ()]
    assert shapes == [(2, 4, 5, 3), (1, 6, 3, 3)]


def test_pictures_may_come_as_ragged_tensors(folder: Path) -> None:
    config = model_config()
    instance = load(DaliBackend({}), config, folder)
    assert config.input[0].allow_ragged_batch
    files = [np.frombuffer(png(*size), np.uint8)[None] for size in ((5, 4), (60, 50))]
    calls = [RecordedCall({"IMAGE": file}) for file in files]
    instance.execute(RaggedRecordedBatch(*calls))
    shapes = [tensor.array.shape for call in calls for tensor in call.responses[0].outputs or ()]
    assert shapes == [(1, 4, 5, 3), (1, 50, 60, 3)]


class RaggedRecordedBatch(RecordedBatch):
    def gather(self) -> dict[str, Array]:
        """One dimension, as the server's."""
        arrays = [call.request.inputs["IMAGE"].array.reshape(-1) for call in self.calls]
        return {"IMAGE": np.concatenate(arrays)}


def test_a_request_whose_pictures_differ_is_refused_alone(folder: Path) -> None:
    instance = load(DaliBackend({}), model_config(FILES), folder)
    calls = [RecordedCall({"IMAGE": pictures((5, 4), (4, 5))}), RecordedCall({"IMAGE": pictures((3, 6))})]
    instance.execute(RecordedBatch(*calls))
    assert isinstance(calls[0].error, InvalidRequestError)
    assert len(calls[1].responses) == 1


def test_outputs_can_be_split_along_their_first_dimension(folder: Path) -> None:
    text = """max_batch_size: 4 output { name: "ROWS" data_type: TYPE_UINT8 dims: [ -1, 3 ] }
        parameters { key: "split_along_outer_axis" value { string_value: "ROWS" } }"""
    instance = load(DaliBackend({}), model_config(FILES + text), folder)
    call = RecordedCall({"IMAGE": pictures((5, 4), (5, 2))})
    instance.execute(RecordedBatch(call))
    assert [tensor.array.shape for tensor in call.responses[0].outputs or ()] == [(6, 5, 3)]


def test_without_batches_there_is_no_batch_dimension(folder: Path) -> None:
    text = FILES + 'output { name: "PIXELS" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }'
    instance = load(DaliBackend({}), model_config(text), folder)
    assert run(instance, IMAGE=pictures((5, 4))[0])["PIXELS"].shape == (4, 5, 3)


def test_a_pipeline_that_failed_serves_the_next_request(folder: Path) -> None:
    instance = load(DaliBackend({}), model_config(FILES), folder)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"decoders\.image: ") as failed:
            run(instance, IMAGE=np.array([[b"no picture"]], np.object_))
        assert str(Path(__file__).parent) not in str(failed.value)
    assert len(run(instance, IMAGE=pictures((5, 4)))) == 1


def test_a_program_makes_the_pipeline(tmp_path: Path) -> None:
    (tmp_path / "dali.py").write_text(
        "from nvidia.dali import fn, pipeline_def, types\n"
        "from nvidia.dali.plugin.triton import autoserialize\n"
        "@autoserialize\n"
        "@pipeline_def(batch_size=3, num_threads=1, device_id=None, output_dtype=types.FLOAT, output_ndim=1)\n"
        "def doubled():\n"
        "    return fn.external_source(name='GIVEN', dtype=types.FLOAT, ndim=1) * 2\n"
    )
    config = model_config()
    instance = load(DaliBackend({}), config, tmp_path)
    assert config.max_batch_size == 3
    found = run(instance, GIVEN=np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(list(found.values()), np.full((1, 2, 4), 2, np.float32))


def test_a_program_that_fails_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "dali.py").write_text("raise RuntimeError('no such luck')")
    with pytest.raises(ValueError, match=r"dali\.py made no pipeline: RuntimeError: no such luck"):
        load(DaliBackend({}), model_config(), tmp_path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('input { name: "PICTURE" data_type: TYPE_UINT8 dims: [ -1 ] }', "PICTURE"),
        ('input { name: "IMAGE" data_type: TYPE_FP32 dims: [ -1 ] }', "TYPE_FP32"),
        ('input { name: "IMAGE" data_type: TYPE_UINT8 dims: [ -1, 3 ] }', "1 dimensions"),
        ('input { name: "IMAGE" data_type: TYPE_STRING dims: [ 2 ] }', "TYPE_STRING"),
        ('output { name: "A" data_type: TYPE_FP32 dims: [ -1, -1, 3 ] }', "TYPE_FP32"),
        ("model_transaction_policy { decoupled: true }", "decoupled"),
        ('parameters { key: "split_along_outer_axis" value { string_value: "NOBODY" } }', "NOBODY"),
        ('parameters { key: "num_threads" value { string_value: "many" } }', "num_threads"),
    ],
)
def test_what_does_not_fit_the_pipeline_is_named(folder: Path, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load(DaliBackend({}), model_config(text), folder)


@pytest.mark.parametrize("data", [b"", b"no pipeline", decoder().serialize()[:50]])
def test_files_that_are_no_pipelines_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.dali").write_bytes(data)
    with pytest.raises(ValueError, match="no serialized DALI pipeline"):
        load(DaliBackend({}), model_config(), tmp_path)


def test_outputs_that_a_pipeline_does_not_describe_must_be_configured(tmp_path: Path) -> None:
    (tmp_path / "model.dali").write_bytes(scaled_picture(1.0).serialize())
    with pytest.raises(ValueError, match=r"give it a dtype and ndim there, or list it in config\.pbtxt"):
        load(DaliBackend({}), model_config(), tmp_path)


@pytest.mark.parametrize("option", ["plugin_libs", "other"])
def test_unknown_options_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        DaliBackend({option: "x"})
