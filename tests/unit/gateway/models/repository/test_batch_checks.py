"""Ragged and custom batching in configurations: the same is refused as by Triton 2.51, in its words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import text_format

from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.models.repository.batching_checks import check_strategy
from penstock.gateway.models.repository.config_checks import check_supported

BASE = """
    name: "m" backend: "{backend}" platform: "{platform}" max_batch_size: 8
    input [
      {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }},
      {{ name: "FREE" data_type: TYPE_FP32 dims: [ 1 ] optional: true }}
    ]
    output [
      {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "DEEP" data_type: TYPE_FP32 dims: [ 2, -1 ] }}
    ]
"""
MADE = 'target_name: "C" data_type: TYPE_INT32 source_input: "IN"'


def config(more: str, backend: str = "python", platform: str = "") -> ModelConfig:
    return text_format.Parse(BASE.format(backend=backend, platform=platform) + more, ModelConfig())


@pytest.mark.parametrize(
    ("backend", "platform"),
    [
        ("python", ""),
        ("identity", ""),
        ("onnxruntime", "onnxruntime_onnx"),
        ("tensorrt", "tensorrt_plan"),
        ("other", ""),
    ],
)
def test_backends_that_have_ragged_batches(backend: str, platform: str) -> None:
    check_supported(
        config(f'batch_input {{ {MADE} }} batch_output {{ target_name: "OUT" source_input: "IN" }}', backend, platform)
    )


def test_language_models_have_none() -> None:
    with pytest.raises(UnsupportedError, match=r"input\.allow_ragged_batch of model 'm' is not supported: only for"):
        check_supported(config("", "vllm"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            'batch_input { target_name: "C" data_type: TYPE_INT32 }',
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m",
        ),
        (
            f'batch_input {{ kind: BATCH_ITEM_SHAPE {MADE} source_input: "IN" }}',
            "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 2 for m",
        ),
        (
            f"batch_input {{ {MADE.replace('INT32', 'INT64')} }}",
            "batch input data type must be TYPE_INT32 or TYPE_FP32 for m",
        ),
        (
            f"batch_input {{ {MADE.replace('IN', 'X')} }}".replace("TYPE_XT32", "TYPE_INT32"),
            "unknown source input name 'X' for m",
        ),
        (f"batch_input {{ {MADE} kind: 9 }}", "unknown batch input kind '9' for m"),
        (
            f"batch_input {{ {MADE} }} batch_input {{ {MADE} }}",
            "target input name 'C' can only be specified once for m",
        ),
        (
            f"batch_input {{ {MADE.replace('C', 'FREE')} }}",
            "target input name 'FREE' is the name of another input for m",
        ),
        (
            'batch_input { target_name: "C" data_type: TYPE_INT32 source_input: "FREE" }',
            "source input 'FREE' must not be optional for m",
        ),
        ('batch_input { data_type: TYPE_INT32 source_input: "IN" }', "batch input must specify 'target_name' for m"),
        (
            'batch_output { target_name: "OUT" }',
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m",
        ),
        ('batch_output { target_name: "X" source_input: "IN" }', "unknown target output name 'X' for m"),
        ('batch_output { target_name: "OUT" source_input: "X" }', "unknown source input name 'X' for m"),
        (
            'batch_output { target_name: [ "OUT", "OUT" ] source_input: "IN" }',
            "target output name 'OUT' can only be specified once for m",
        ),
        (
            'batch_output { target_name: "DEEP" source_input: "IN" }',
            "dimension 1 of output 'DEEP' is variable, and its source input 'IN' has 1 for m",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_supported(config(text))
    assert caught.value.message == told


DYNAMIC = "dynamic_batching { }"
LIBRARY = 'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "/models/volume.so" } }'
NAMED = LIBRARY.replace("/models/volume.so", "rules/by_volume.py")


def folder(root: Path, *files: str) -> tuple[Path, Path]:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root, root / "1"


@pytest.mark.parametrize(
    ("text", "files"),
    [
        (DYNAMIC, ()),
        (DYNAMIC, ("batchstrategy.py",)),
        (DYNAMIC, ("1/batchstrategy.py",)),
        (DYNAMIC, ("batchstrategy.so", "batchstrategy.py")),
        (DYNAMIC + LIBRARY, ("batchstrategy.py",)),
        (DYNAMIC + NAMED, ("rules/by_volume.py",)),
        ("", ("batchstrategy.so",)),  # Triton finds it too, and never asks it
    ],
)
def test_where_custom_batching_may_be(tmp_path: Path, text: str, files: tuple[str, ...]) -> None:
    check_strategy(config(text), *folder(tmp_path, *files))


@pytest.mark.parametrize(
    ("text", "files", "told"),
    [
        (
            DYNAMIC + LIBRARY,
            (),
            "has a library for custom batching (/models/volume.so), which is not loaded here: write",
        ),
        (
            DYNAMIC,
            ("1/batchstrategy.so",),
            "a file batchstrategy.py in the model's folder (docs/batching.md#custom-batching)",
        ),
        (DYNAMIC + NAMED, (), "there is no file 'rules/by_volume.py' in the model's folder"),
        (DYNAMIC + NAMED.replace("rules", ".."), (), "must be a relative path inside the model's folder"),
        (DYNAMIC + NAMED.replace("rules", "a" * 300), (), "must be a relative path inside the model's folder"),
        (DYNAMIC + NAMED.replace("rules", "a/" * 600 + "a"), (), "must be a relative path inside the model's folder"),
        (DYNAMIC + LIBRARY.replace("volume", r"\n"), (), "has unprintable characters"),
        ("", ("batchstrategy.py",), "batchstrategy.py needs dynamic_batching and max_batch_size for m"),
        (NAMED, ("rules/by_volume.py",), "by_volume.py needs dynamic_batching and max_batch_size for m"),
        (LIBRARY.replace("/models/volume.so", ""), (), "has a library for custom batching (batchstrategy.so)"),
        ("sequence_batching { }", ("batchstrategy.py",), "batchstrategy.py needs dynamic_batching"),
        (
            "sequence_batching { }" + NAMED,
            ("rules/by_volume.py",),
            "TRITON_BATCH_STRATEGY_PATH cannot be specified with sequence batcher, using default batching strategy",
        ),
    ],
)
def test_custom_batching_that_is_refused(tmp_path: Path, text: str, files: tuple[str, ...], told: str) -> None:
    with pytest.raises((InvalidRequestError, UnsupportedError), match=re.escape(told)):
        check_strategy(config(text), *folder(tmp_path, *files))


def test_language_models_have_no_custom_batching(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="language models have their scheduler instead"):
        check_strategy(config(DYNAMIC, "vllm"), *folder(tmp_path, "batchstrategy.py"))
