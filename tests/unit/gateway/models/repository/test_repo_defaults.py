"""What is filled into a configuration, against the answers of a real Triton 2.51."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from penstock.classic.model_config import DataType, ModelConfig, config_dict
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.repository.config_checks import check_supported
from penstock.gateway.models.repository.config_file import read_config
from penstock.gateway.models.repository.defaults import complete

CASES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "triton_2_51_configs.json").read_text())["cases"]


def model_folder(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return folder


def completed(text: str, folder: Path, *, name: str = "m", gpus: int = 0) -> ModelConfig:
    config = text_format.Parse(text, ModelConfig())
    complete(config, name, folder, gpus=gpus)
    return config


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"no_config"}))
def test_the_configuration_is_tritons(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path, "1/model.py")
    (folder / "config.pbtxt").write_text(CASES[name]["pbtxt"])
    config = read_config(folder, name, override=None)
    complete(config, name, folder)
    check_supported(config)
    assert config_dict(config) == CASES[name]["config"]


def test_a_second_completion_takes_up_what_the_backend_filled_in(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "1/model.py")
    config = read_config(folder, "no_config", override=None)
    complete(config, "no_config", folder)
    config.input.add(name="INPUT0", data_type=DataType.TYPE_FP32, dims=[4])
    config.output.add(name="OUTPUT0", data_type=DataType.TYPE_FP32, dims=[4])
    config.max_batch_size = 8
    config.dynamic_batching.SetInParent()
    complete(config, "no_config", folder)
    assert config_dict(config) == CASES["no_config"]["config"]


def test_add_sub_is_as_measured(tmp_path: Path) -> None:
    tensors = " ".join(
        f'{kind} {{ name: "{kind.upper()}{i}" data_type: TYPE_FP32 dims: [ 16 ] }}'
        for kind in ("input", "output")
        for i in (0, 1)
    )
    text = f'backend: "python" {tensors} instance_group [ {{ count: 1 kind: KIND_CPU }} ]'
    flags = {"is_shape_tensor": False, "is_non_linear_format_io": False}
    assert config_dict(completed(text, tmp_path, name="add_sub")) == {
        "name": "add_sub",
        "platform": "",
        "backend": "python",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            {
                "name": name,
                "data_type": "TYPE_FP32",
                "format": "FORMAT_NONE",
                "dims": [16],
                "allow_ragged_batch": False,
                "optional": False,
                **flags,
            }
            for name in ("INPUT0", "INPUT1")
        ],
        "output": [
            {"name": name, "data_type": "TYPE_FP32", "dims": [16], "label_filename": "", **flags}
            for name in ("OUTPUT0", "OUTPUT1")
        ],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
        "instance_group": [
            {
                "name": "add_sub_0",
                "kind": "KIND_CPU",
                "count": 1,
                "gpus": [],
                "secondary_devices": [],
                "profile": [],
                "passive": False,
                "host_policy": "",
            }
        ],
        "default_model_filename": "model.py",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }


@pytest.mark.parametrize(
    ("text", "file", "backend", "platform", "filename"),
    [
        ("", "model.onnx", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ("", "model.plan", "tensorrt", "tensorrt_plan", "model.plan"),
        ("", "model.savedmodel/saved_model.pb", "tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
        ("", "model.graphdef", "tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ('backend: "tensorflow"', "model.graphdef", "tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ('backend: "tensorflow"', "x", "tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
        ('platform: "tensorflow_graphdef"', "x", "tensorflow", "tensorflow_graphdef", "model.graphdef"),
        ("", "model.pt", "pytorch", "pytorch_libtorch", "model.pt"),
        ("", "model.xml", "openvino", "", "model.xml"),
        ("", "model.py", "python", "", "model.py"),
        ("", "model.onnx/weights", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('platform: "onnxruntime_onnx"', "x", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('platform: "tensorrt_plan"', "x", "tensorrt", "tensorrt_plan", "model.plan"),
        ('platform: "pytorch_libtorch"', "x", "pytorch", "pytorch_libtorch", "model.pt"),
        ('default_model_filename: "model.py"', "model.onnx", "python", "", "model.py"),
        (
            'backend: "onnxruntime" default_model_filename: "net.onnx"',
            "x",
            "onnxruntime",
            "onnxruntime_onnx",
            "net.onnx",
        ),
        ('backend: "my_own"', "model.py", "my_own", "", ""),
    ],
)
def test_the_backend_is_found(tmp_path: Path, text: str, file: str, backend: str, platform: str, filename: str) -> None:
    config = completed(text, model_folder(tmp_path, f"1/{file}"))
    assert (config.backend, config.platform, config.default_model_filename) == (backend, platform, filename)


def test_the_first_version_tells_the_backend(tmp_path: Path) -> None:
    assert completed("", model_folder(tmp_path, "10/model.py", "9/model.onnx")).backend == "onnxruntime"


def test_a_dotted_name_tells_the_backend(tmp_path: Path) -> None:
    config = completed("", model_folder(tmp_path, "1/model.identity"), name="m.identity")
    assert (config.backend, config.default_model_filename) == ("identity", "model.identity")


@pytest.mark.parametrize("files", [[], ["1/model.txt"], ["1/model.pt/x"]])
def test_no_backend(tmp_path: Path, files: list[str]) -> None:
    expected = "^Invalid model name: Could not determine backend for model 'm' with no backend in model configuration"
    with pytest.raises(InvalidRequestError, match=expected):
        completed("", model_folder(tmp_path, *files))


@pytest.mark.parametrize(
    ("text", "gpus", "groups"),
    [
        ('backend: "onnxruntime"', 0, [("m", "KIND_CPU", 2, [])]),
        ('backend: "onnxruntime"', 2, [("m", "KIND_GPU", 1, [0, 1])]),
        ('backend: "python"', 2, [("m", "KIND_CPU", 1, [])]),
        ('backend: "vllm"', 1, [("m", "KIND_MODEL", 1, [])]),
        ('backend: "x" instance_group [ { gpus: [ 1 ] } ]', 2, [("m_0", "KIND_GPU", 1, [1])]),
        ('backend: "x" instance_group [ { gpus: [ 5 ] } ]', 2, [("m_0", "KIND_CPU", 1, [5])]),
        ('backend: "x" instance_group [ { kind: KIND_GPU count: 3 } ]', 0, [("m_0", "KIND_GPU", 3, [])]),
        ('backend: "onnxruntime" instance_group [ { kind: KIND_CPU } ]', 1, [("m_0", "KIND_CPU", 2, [])]),
    ],
)
def test_instance_groups(tmp_path: Path, text: str, gpus: int, groups: list[tuple[str, str, int, list[int]]]) -> None:
    found = config_dict(completed(text, tmp_path, gpus=gpus))["instance_group"]
    assert [(group["name"], group["kind"], group["count"], group["gpus"]) for group in found] == groups


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", "must specify 'step' for ensemble 'm'"),
        ("instance_group { }", "instance_group should not be specified for ensemble 'm'"),
        ("optimization { }", "optimization should not be specified for ensemble 'm'"),
        ('backend: "python"', "backend should not be specified for ensemble 'm'"),
    ],
)
def test_nothing_is_filled_into_an_ensemble_and_it_is_one_of_models_only(tmp_path: Path, more: str, told: str) -> None:
    config = completed(f'platform: "ensemble" ensemble_scheduling {{ }} {more}', tmp_path)
    assert (config.backend, len(config.instance_group)) == ("python" if "backend" in more else "", "inst" in more)
    with pytest.raises(InvalidRequestError, match=told):
        check_supported(config)


def test_steps_are_for_ensembles_only(tmp_path: Path) -> None:
    config = completed('backend: "python" ensemble_scheduling { step { model_name: "x" } }', tmp_path)
    with pytest.raises(InvalidRequestError, match="cannot be set for model 'm' whose platform is not ensemble"):
        check_supported(config)
