"""Warm-up samples: what is sent, when, and what happens when it goes wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from penstock.classic.messages import WarmUpRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.gateway.models.repository.warmup import MAX_BYTES, MAX_SEQUENCES, warm_up, warmup_inputs
from support.repository import FakeLoader, FakeModel, FakeRepository, ask, serving, states


def _config(sample: str, max_batch_size: int = 8) -> ModelConfig:
    return text_format.Parse(f"max_batch_size: {max_batch_size} model_warmup {{ {sample} }}", ModelConfig())


def _inputs(tmp_path: Path, data: str, *, batch_size: int = 1, max_batch_size: int = 8) -> Tensor:
    config = _config(
        f'name: "s" batch_size: {batch_size} inputs {{ key: "X" value {{ {data} }} }}', max_batch_size=max_batch_size
    )
    return warmup_inputs(config, config.model_warmup[0], tmp_path)["X"]


@pytest.mark.parametrize("name", ["BOOL", "UINT8", "UINT64", "INT8", "INT64", "FP16", "BF16", "FP32", "FP64", "STRING"])
@pytest.mark.parametrize("kind", ["zero_data", "random_data"])
def test_made_up_values_of_every_type(tmp_path: Path, name: str, kind: str) -> None:
    tensor = _inputs(tmp_path, f"data_type: TYPE_{name} dims: [64, 2] {kind}: true", batch_size=3)
    assert tensor.array.shape == (3, 64, 2)
    assert tensor.datatype == ("BYTES" if name == "STRING" else name)
    values = tensor.array.ravel().tolist()
    varied = kind == "random_data" and name != "STRING"  # Triton's texts are empty: models parse theirs
    assert (len(set(values)) > 1) == varied
    if not varied:
        assert values[0] == (b"" if name == "STRING" else 0)
    elif name.startswith(("FP", "BF")):
        assert all(0 <= value <= 1 for value in values)


def test_the_batch_size_makes_a_dimension(tmp_path: Path) -> None:
    data = "data_type: TYPE_INT32 dims: [2] zero_data: true"
    assert _inputs(tmp_path, data).array.shape == (1, 2)
    assert _inputs(tmp_path, data, max_batch_size=0).array.shape == (2,)
    assert _inputs(tmp_path, "data_type: TYPE_INT32 zero_data: true", max_batch_size=0).array.shape == ()


def test_values_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "x").write_bytes(np.array([1.5, 2.5], "<f4").tobytes())
    (tmp_path / "warmup" / "text").write_bytes(b"\x02\0\0\0hi")
    tensor = _inputs(tmp_path, 'data_type: TYPE_FP32 dims: [2] input_data_file: "x"', batch_size=2)
    assert tensor.array.tolist() == [[1.5, 2.5], [1.5, 2.5]]
    assert _inputs(tmp_path, 'data_type: TYPE_FP32 dims: [1] input_data_file: "x"').array.tolist() == [[1.5]]
    assert _inputs(tmp_path, 'data_type: TYPE_STRING dims: [1] input_data_file: "text"').array.tolist() == [[b"hi"]]
    with pytest.raises(InvalidRequestError, match="unexpected total byte size 8 for input 'X', expecting 12"):
        _inputs(tmp_path, 'data_type: TYPE_FP32 dims: [3] input_data_file: "x"')


def test_a_file_may_be_longer_than_its_numbers(tmp_path: Path) -> None:
    """Report server#1796: one sample serves models of several sizes; Triton reads what it needs."""
    (tmp_path / "warmup").mkdir()
    with (tmp_path / "warmup" / "x").open("wb") as file:
        file.write(np.arange(4, dtype="<i2").tobytes() + b"\n")
        file.truncate(MAX_BYTES + 1)
    assert _inputs(tmp_path, 'data_type: TYPE_INT16 dims: [3] input_data_file: "x"').array.tolist() == [[0, 1, 2]]
    with pytest.raises(InvalidRequestError, match=f"has more than {MAX_BYTES} bytes"):
        _inputs(tmp_path, 'data_type: TYPE_STRING dims: [3] input_data_file: "x"')


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"s spouse; ", "expecting string of length 1886593139"),
        (b"\x08\0\0\0" + "accused\u2019s".encode(), "unexpected number of string elements 2"),
    ],
)
def test_a_text_has_its_length_in_bytes_before_it(tmp_path: Path, data: bytes, error: str) -> None:
    """Reports server#3844 and #6161: a plain text file, and a length that counts characters."""
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "text").write_bytes(data)
    with pytest.raises(InvalidRequestError, match=error):
        _inputs(tmp_path, 'data_type: TYPE_STRING dims: [1] input_data_file: "text"')


@pytest.mark.parametrize("path", ["missing", "../secret", "link/../secret", "/etc/passwd", "."])
def test_files_elsewhere(tmp_path: Path, path: str) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "secret").write_bytes(b"12")
    (tmp_path / "warmup" / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidRequestError, match="there is no file"):
        _inputs(tmp_path, f'data_type: TYPE_INT8 dims: [2] input_data_file: "{path}"')


@pytest.mark.parametrize(("dims", "batch_size"), [([MAX_BYTES], 1), ([2**60 + 2, 16], 1), ([2**25], 8)])
def test_nothing_is_allocated_for_what_is_too_large(tmp_path: Path, dims: list[int], batch_size: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"more (elements )?than"):
        _inputs(tmp_path, f"data_type: TYPE_FP64 dims: {dims} random_data: true", batch_size=batch_size)


async def test_samples_are_sent_to_every_instance_and_not_counted() -> None:
    zeros = 'inputs { key: "X" value { data_type: TYPE_INT8 dims: [1] zero_data: true } }'
    config = _config(f'name: "s" batch_size: 1 count: 3 {zeros}')
    config.instance_group.add(count=2)
    config.model_warmup.add(name="t", batch_size=1)
    config.model_warmup.add(name="left out", count=5)
    model = FakeModel("a", 1, "a", config)
    model.statistics.inference_count = 8
    model.statistics.success.add(5)
    model.statistics.batches[1].compute_infer.add(3)
    await warm_up(model, Path("unused"))
    assert len(model.requests) == 8
    assert model.requests[0].inputs["X"].array.tolist() == [[0]]
    assert model.statistics.inference_count == 0
    assert model.statistics.success.ns == 0
    assert not model.statistics.batches


SAMPLE = """
input { name: "X" data_type: TYPE_FP32 dims: [2] }
model_warmup { name: "s" batch_size: 1 inputs { key: "X" value { data_type: TYPE_FP32 dims: [2] zero_data: true } } }
"""
SEQUENCES = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  state { input_name: "S" output_name: "T" data_type: TYPE_INT8 dims: [1] }
}
input { name: "X" data_type: TYPE_INT8 dims: [1] }
"""


async def test_a_sample_of_a_model_with_sequences_is_as_many_sequences(tmp_path: Path) -> None:
    data = "value { data_type: TYPE_INT8 dims: [1] zero_data: true }"
    names = " ".join(f'inputs {{ key: "{name}" {data} }}' for name in ("X", "START", "S"))
    config = text_format.Parse(f"{SEQUENCES} max_batch_size: 4 model_warmup {{ batch_size: 3 {names} }}", ModelConfig())
    model = FakeModel("a", 1, "a", config)
    await warm_up(model, tmp_path)
    assert [request.correlation_id for request in model.requests] == [1, 2, 3]
    for request in model.requests:
        assert isinstance(request, WarmUpRequest)
        assert (request.sequence_start, request.sequence_end, list(request.inputs)) == (True, True, ["X"])
        assert {name: tensor.array.shape for name, tensor in request.overrides.items()} == {
            "START": (1, 1),
            "S": (1, 1),
        }


async def test_the_sequences_of_a_sample_have_a_bound(tmp_path: Path) -> None:
    config = text_format.Parse(f"{SEQUENCES} model_warmup {{ batch_size: {MAX_SEQUENCES + 1} }}", ModelConfig())
    with pytest.raises(InvalidRequestError, match="is more than 4096 sequences"):
        await warm_up(FakeModel("a", 1, "a", config), tmp_path)


async def test_a_model_that_fails_its_warm_up_is_not_loaded(tmp_path: Path) -> None:
    repository, loader = FakeRepository(tmp_path), FakeLoader()
    repository.put("a", "a1", config=SAMPLE)
    async with serving(repository, loader=loader) as manager:
        await manager.load("a")
        assert len(loader.models[0].requests) == 1
        loader.infer_failures = EngineError("it explodes")
        repository.put("a", "a2", config=SAMPLE)
        with pytest.raises(InvalidRequestError, match="failed to run warmup sample 's': it explodes"):
            await manager.load("a")
        assert states(manager) == ["a 1 READY Invalid argument: failed to run warmup sample 's': it explodes"]
        assert await ask(manager, "a") == "a1"
        assert [model.tag for model in loader.live] == ["a1"]


async def test_a_sample_that_does_not_fit_the_model(tmp_path: Path) -> None:
    repository, loader = FakeRepository(tmp_path), FakeLoader()
    repository.put("a", "a1", config=SAMPLE.replace('key: "X"', 'key: "Y"'))
    async with serving(repository, loader=loader) as manager:
        with pytest.raises(InvalidRequestError, match=r"warmup sample 's'.* unknown input 'Y'"):
            await manager.load("a")
        assert loader.models == []
