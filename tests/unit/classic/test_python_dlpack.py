"""DLPack, with torch as the other side."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.classic.messages import InferRequest
from penstock.classic.python.worker import dlpack
from penstock.classic.python.worker.errors import TritonModelException
from penstock.classic.python.worker.tensor import NUMBERS, Tensor
from penstock.classic.tensors import Tensor as ServerTensor
from support.python_backend import CPU, loaded, request

torch = pytest.importorskip("torch")

TYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16", "bool"]


@pytest.mark.parametrize("name", TYPES)
def test_from_torch_and_back(name: str) -> None:
    source = torch.tensor([[1, 0, 3], [4, 5, 6]], dtype=getattr(torch, name))
    tensor = Tensor.from_dlpack("X", source)
    assert tensor.shape() == [2, 3]
    again = torch.from_dlpack(tensor)
    assert again.dtype == source.dtype
    assert torch.equal(again, source)
    source[0, 0] = 0
    assert torch.equal(again, source)  # the same memory


@pytest.mark.parametrize("name", TYPES)
def test_capsules_bring_every_type_there_and_back(name: str) -> None:
    source = torch.tensor([1, 0, 1], dtype=getattr(torch, name))
    tensor = Tensor.from_dlpack("X", torch.utils.dlpack.to_dlpack(source))
    assert torch.equal(torch.utils.dlpack.from_dlpack(tensor.to_dlpack()), source)


def test_bf16_is_bf16() -> None:
    tensor = Tensor.from_dlpack("X", torch.tensor([1.5, -2], dtype=torch.bfloat16))
    assert tensor.triton_dtype() == NUMBERS["BF16"] == 14
    assert tensor.as_numpy().astype(np.float32).tolist() == [1.5, -2]


def test_bf16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    tensor = Tensor.from_dlpack("X", torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(TritonModelException, match="Tensor dtype is BF16 and cannot be converted to NumPy"):
        tensor.as_numpy()
    assert torch.equal(torch.from_dlpack(tensor), torch.ones(1, dtype=torch.bfloat16))


def test_memory_is_let_go() -> None:
    before = len(dlpack._exported)
    for _ in range(10):
        tensor = Tensor.from_dlpack("X", torch.ones(1000, dtype=torch.bfloat16))
        used = torch.from_dlpack(tensor)
        unused = tensor.to_dlpack()
    assert len(dlpack._exported) > before
    assert float(used.sum()) == 1000
    del tensor, used, unused
    gc.collect()
    assert len(dlpack._exported) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_contiguous_is_refused(dtype: str) -> None:
    source = torch.ones((4, 6), dtype=getattr(torch, dtype))
    with pytest.raises(TritonModelException, match="DLPack tensor is not contiguous"):
        Tensor.from_dlpack("X", source.t())
    assert Tensor.from_dlpack("X", source[1:2].t()).shape() == [6, 1]
    assert Tensor.from_dlpack("X", source[:0]).shape() == [0, 6]


def test_other_things_are_refused() -> None:
    with pytest.raises(TritonModelException, match="must be a DLPack capsule"):
        Tensor.from_dlpack("X", "text")
    with pytest.raises(TritonModelException, match="TYPE_BYTES tensors cannot be converted"):
        Tensor("X", np.array([b"a"])).to_dlpack()


def test_read_only_arrays_are_copied() -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    found = torch.from_dlpack(Tensor("X", array))
    found[0] = 5
    assert array[0] == 1


async def test_in_a_model(tmp_path: Path) -> None:
    code = """
from torch.utils.dlpack import from_dlpack, to_dlpack
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for r in requests:
            a, b = (from_dlpack(t.to_dlpack()) for t in r.inputs())
            outputs = [pb_utils.Tensor.from_dlpack("Y", to_dlpack(a * 2)), pb_utils.Tensor.from_dlpack("Z", b * 2)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
    config = f"""
input [ {{ name: "A" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "B" data_type: TYPE_BF16 dims: [ -1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "Z" data_type: TYPE_BF16 dims: [ -1 ] }} ]
{CPU}
"""
    import ml_dtypes

    half = np.array([1, 2], ml_dtypes.bfloat16)
    async with loaded(tmp_path, code, config) as model:
        asked = request(A=np.arange(20_000, dtype=np.float32))
        response = await model.infer(InferRequest(inputs={**asked.inputs, "B": ServerTensor("B", "BF16", half)}))
    first, second = response.outputs or ()
    np.testing.assert_array_equal(first.array, np.arange(20_000, dtype=np.float32) * 2)
    assert second.datatype == "BF16"
    assert second.array.tolist() == [2, 4]
