"""Backends with ragged inputs: served in batches, and configurations that do not fit the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from onnx import TensorProto

from backend_candidates.pytorch import write_script
from penstock.classic.base import Backend
from penstock.classic.identity import IdentityBackend
from penstock.classic.loading import load_model
from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.onnxruntime.backend import OnnxRuntimeBackend
from penstock.classic.openvino.backend import OpenVINOBackend
from penstock.classic.pytorch.backend import PyTorchBackend
from support.backends import load, model_context
from support.classic import output
from support.classic import request as made
from support.onnx import identity, save
from support.ragged import CONFIG, write_sums


def config(text: str = CONFIG) -> ModelConfig:
    return text_format.Parse(text, ModelConfig(name="sums"))


def floats(*values: float) -> InferRequest:
    return made(INPUT=np.array([values], np.float32))


class Sums(torch.nn.Module):
    def forward(
        self, values: torch.Tensor, ends: torch.Tensor, width: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        at_end = values.cumsum(0)[ends.to(torch.int64) - 1]
        at_start = torch.cat([torch.zeros(1), at_end[:-1]])
        longest = torch.full([len(at_end), 1], width.size(0), dtype=torch.int64)
        return values + values, (at_end - at_start).unsqueeze(1), longest


def write_script_of_sums(folder: Path) -> Path:
    write_script(folder / "sums" / "1", Sums())
    return folder / "sums" / "1"


@pytest.mark.parametrize(
    ("backend", "write"),
    [
        (OnnxRuntimeBackend({}), write_sums),
        (OpenVINOBackend({}), write_sums),
        (PyTorchBackend({}), write_script_of_sums),
    ],
    ids=["onnxruntime", "openvino", "pytorch"],
)
async def test_requests_of_different_shapes_are_one_execution(
    tmp_path: Path, backend: Backend, write: Callable[[Path], Path]
) -> None:
    version = write(tmp_path)
    model = await load_model(model_context(config(), version), backend)
    answers = await asyncio.gather(*(model.infer(floats(*row)) for row in ([1, 2, 3], [4], [5, 6], [7])))
    await model.stop()
    assert model.statistics.execution_count == 1
    assert [output(answer, "SUM").tolist() for answer in answers] == [[[6]], [[4]], [[11]], [[7]]]
    assert [output(answer, "DOUBLED").tolist() for answer in answers] == [[[2, 4, 6]], [[8]], [[10, 12]], [[14]]]
    assert {output(answer, "LONGEST").item() for answer in answers} == {3}


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("allow_ragged_batch: true", "", "the model expects 1 dimensions"),
        ('"ENDS" data_type: TYPE_INT32', '"ENDS" data_type: TYPE_FP32', "expects datatype TYPE_FP32 for input 'ENDS'"),
        (
            'target_name: "ENDS"',
            'target_name: "STARTS"',
            "unexpected inference input 'STARTS', allowed inputs are: ENDS",
        ),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", "BATCH_ITEM_SHAPE", "batch input 'ENDS' has 2 dimensions, model provides"),
        (
            'SHAPE target_name: "DOUBLED"',
            'SHAPE target_name: "SUM"',
            "tensor 'DOUBLED': the model expects 1 dimensions",
        ),
        ('target_name: "WIDTH"', 'target_name: [ "WIDTH", "HEIGHT" ]', "expects 4 inputs, model provides 3"),
    ],
)
def test_configurations_that_do_not_fit_the_model(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert old in CONFIG
    with pytest.raises(ValueError, match=text):
        load(OnnxRuntimeBackend({}), config(CONFIG.replace(old, new, 1)), write_sums(tmp_path))


def test_a_ragged_input_needs_one_variable_dimension_in_the_model(tmp_path: Path) -> None:
    text = """max_batch_size: 4 input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }"""
    with pytest.raises(ValueError, match=r"shape \[-1\]  for ragged input 'X', model provides \[-1,-1\]"):
        load(OnnxRuntimeBackend({}), config(text), save(identity(TensorProto.FLOAT, ("b", "n")), tmp_path / "m"))


def test_what_batch_input_fills_is_not_completed_as_an_input(tmp_path: Path) -> None:
    given = config()
    del given.output[:]
    del given.batch_output[:]
    OnnxRuntimeBackend({}).auto_complete(given, write_sums(tmp_path))
    assert [tensor.name for tensor in given.input] == ["INPUT"]
    assert len(given.output) == 3


@pytest.mark.parametrize("divided", ["", 'batch_output { target_name: "OUTPUT0" source_input: "INPUT0" }'])
async def test_the_identity_backend_answers_each_in_its_own_shape(divided: str) -> None:
    text = f"""
        backend: "identity" max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: 30000000 }}
        input {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }}
        output {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }} {divided}"""
    model = await load_model(model_context(config(text), Path("1")), IdentityBackend({}))
    rows = [[[1, 2, 3]], [[4], [5]], [[6, 7]]]
    answers = await asyncio.gather(*(model.infer(made(INPUT0=row)) for row in rows))
    await model.stop()
    assert [output(answer).tolist() for answer in answers] == rows
    assert model.statistics.execution_count == 1
