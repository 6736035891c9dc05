"""Tensors that a configuration lists: those of the form, others, and those that only others serve."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format

from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensors import Tensor
from penstock.engines.errors import UnsupportedError
from penstock.gateway.models.language.kserve.tensor_form import Form
from penstock.gateway.models.language.kserve.trtllm_form import TRTLLM_FORM
from penstock.gateway.models.language.kserve.vllm_form import VLLM_FORM
from support.language_repository import TRTLLM_CONFIG, VLLM_CONFIG

IMAGE = 'input { name: "image" data_type: TYPE_STRING dims: [ -1 ] optional: true }'


def completed(text: str, form: Form = VLLM_FORM) -> ModelConfig:
    config: ModelConfig = text_format.Parse(text, ModelConfig())
    form.complete(config)
    return config


@pytest.mark.parametrize(("text", "form"), [(VLLM_CONFIG, VLLM_FORM), (TRTLLM_CONFIG, TRTLLM_FORM)])
def test_the_samples_get_every_tensor_of_their_form(text: str, form: Form) -> None:
    config = completed(text, form)
    assert form.inputs.keys() <= {tensor.name for tensor in config.input}
    assert form.outputs.keys() <= {tensor.name for tensor in config.output}
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
    assert config.model_transaction_policy.decoupled


def test_what_only_others_serve_may_be_listed_but_not_used() -> None:
    config = completed(VLLM_CONFIG + IMAGE)
    assert "image" in {tensor.name for tensor in config.input}
    assert "image" not in {tensor.name for tensor in completed(VLLM_CONFIG).input}
    image = Tensor("image", "BYTES", np.array([b""], np.object_))
    with pytest.raises(UnsupportedError, match="'image' is not supported: this model reads text only"):
        VLLM_FORM.check_request(InferRequest(inputs={"image": image}))


@pytest.mark.parametrize(
    "text",
    [
        'input { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] }',
        'input { name: "text_input" data_type: TYPE_FP32 dims: [ 1 ] }',
        'input { name: "text_input" data_type: TYPE_STRING dims: [ 1, 1 ] }',
        'output { name: "tokens" data_type: TYPE_INT32 dims: [ -1 ] }',
    ],
)
def test_other_tensors_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not one that language models have in that form"):
        completed(text)


def test_batches_are_the_engine_s_own() -> None:
    with pytest.raises(ValueError, match="max_batch_size must be 0"):
        completed("max_batch_size: 8")
