"""Tensors that are sent, beside those that Triton's own client makes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import tritonclient.http as triton

from penstock.loadtest.clients.kserve_model import ModelMetadata, TensorMetadata
from penstock.loadtest.clients.tensors import SIZES, Tensor, random_tensors
from penstock.loadtest.errors import LoadTestError
from unit.loadtest.clients.wires import OPTIONS


def tensors(*texts: str, metadata: ModelMetadata | None = None, **options: Any) -> list[Tensor]:
    return random_tensors(msgspec.structs.replace(OPTIONS, input_tensor=texts, **options), metadata)


def of(*shape: int, **options: Any) -> list[Tensor]:
    return tensors(metadata=ModelMetadata([TensorMetadata("X", "FP32", list(shape))]), **options)


@pytest.mark.parametrize("datatype", ["BYTES", *SIZES])
def test_elements_are_those_of_tritons_client(datatype: str) -> None:
    [tensor] = tensors(f"X:{datatype}:2,3")
    dtype = {"BYTES": np.object_, "BF16": ml_dtypes.bfloat16, "BOOL": np.bool_}.get(datatype)
    numbers = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
    array = tensor.values.reshape(2, 3).astype(dtype or numbers.get(datatype) or datatype.lower())
    expected = triton.InferInput("X", [2, 3], datatype)
    expected.set_data_from_numpy(array)
    assert tensor.raw() == expected._get_binary_data()
    assert len(tensor.raw()) == SIZES.get(datatype, 20) * 6


@pytest.mark.parametrize("datatype", ["BYTES", *SIZES])
def test_json_and_binary_hold_the_same(datatype: str) -> None:
    [tensor] = tensors(f"X:{datatype}:2,3")
    sent = msgspec.json.decode(msgspec.json.encode(tensor.json()))
    if datatype == "BYTES":
        assert b"".join(len(text).to_bytes(4, "little") + text.encode() for text in sent) == tensor.raw()
        return
    types = {"FP16": "f2", "FP32": "f4", "FP64": "f8", "BF16": ml_dtypes.bfloat16, "BOOL": "?"}
    dtype = np.dtype(types.get(datatype, datatype.lower()))
    assert np.allclose(np.array(sent, dtype).astype(float), np.frombuffer(tensor.raw(), dtype).astype(float), atol=1e-2)


def test_values_follow_from_the_seed() -> None:
    one, again, other = (tensors("X:FP32:64", "Y:INT64:64", seed=seed) for seed in (1, 1, -2))
    assert [tensor.raw() for tensor in one] == [tensor.raw() for tensor in again]
    assert [tensor.raw() for tensor in one] != [tensor.raw() for tensor in other]
    assert one[0].values.min() >= 0
    assert one[1].values.max() < 100


@pytest.mark.parametrize(
    ("shape", "batch", "expected"),
    [((-1, 16), 1, (1, 16)), ((-1, 16), 4, (4, 16)), ((3, 16), 1, (3, 16)), ((-1,), 1, (1,)), ((), 1, ())],
)
def test_shapes_from_metadata(shape: tuple[int, ...], batch: int, expected: tuple[int, ...]) -> None:
    [tensor] = of(*shape, batch_size=batch)
    assert tensor.shape == expected
    assert len(tensor.json()) == np.prod(expected, dtype=int)


def test_dimensions_that_nobody_knows() -> None:
    with pytest.raises(LoadTestError, match=r"input X open \(-1,3,-1\).*--input-tensor X:FP32"):
        of(-1, 3, -1)
    with pytest.raises(LoadTestError, match="batch-size"):
        of(3, 16, batch_size=2)
    with pytest.raises(LoadTestError, match="no input"):
        tensors(metadata=ModelMetadata())


def test_tensors_by_name() -> None:
    found = tensors("X:FP32:1,3", "Y:INT8:1", batch_size=5)
    assert [(each.name, each.datatype, each.shape) for each in found] == [("X", "FP32", (5, 3)), ("Y", "INT8", (5,))]


@pytest.mark.parametrize(
    "text", ["X", "X:FP32:a", "X:FP32:1,-1", "X:FP32:0", ":FP32:1", "X:FP33:1", "X:fp32:1", "X::1", "X:FP32:1,,2"]
)
def test_what_is_no_tensor(text: str) -> None:
    with pytest.raises(LoadTestError):
        tensors(text)


def test_tensors_that_contradict() -> None:
    with pytest.raises(LoadTestError, match="twice"):
        tensors("X:FP32:1", "X:FP32:2")
    with pytest.raises(LoadTestError, match="begin with 1"):
        tensors("X:FP32:3,4", batch_size=2)
