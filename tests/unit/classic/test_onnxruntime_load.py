"""The onnxruntime backend: completing configurations, refusing wrong ones, and files that lead elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from penstock.classic import parameters as threads
from penstock.classic.base import InstanceContext
from penstock.classic.model_config import ModelConfig
from penstock.classic.onnxruntime import options
from penstock.classic.onnxruntime.backend import OnnxRuntimeBackend
from penstock.classic.onnxruntime.options import providers
from support.backends import load, model_config, model_context, run
from support.onnx import add_sub, add_weights, external, identity, model, save, tensors

IO = """
  input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 } input { name: "INPUT1" data_type: TYPE_FP32 dims: 16 }
  output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 } output { name: "OUTPUT1" data_type: TYPE_FP32 dims: 16 }
"""


def completed(folder: Path, text: str = "", **backend_options: str) -> ModelConfig:
    config = model_config(text)
    OnnxRuntimeBackend({key.replace("_", "-"): value for key, value in backend_options.items()}).auto_complete(
        config, folder
    )
    return config


def refused(folder: Path, text: str, match: str, *, kind: str = "CPU") -> None:
    with pytest.raises(ValueError, match=match):
        load(OnnxRuntimeBackend({}), model_config(text), folder, kind=kind)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(add_sub(), tmp_path / "m")


def test_a_model_without_a_configuration_is_completed_from_its_file(folder: Path) -> None:
    expected = model_config(IO + "max_batch_size: 4 dynamic_batching { }")
    assert text_format.MessageToString(completed(folder)) == text_format.MessageToString(expected)


def test_the_batch_size_of_a_backend_option(folder: Path) -> None:
    assert completed(folder, default_max_batch_size="32").max_batch_size == 32
    alone = completed(folder, default_max_batch_size="1")
    assert (alone.max_batch_size, alone.HasField("dynamic_batching")) == (1, False)
    unbatched = completed(folder, default_max_batch_size="0")
    assert (unbatched.max_batch_size, list(unbatched.input[0].dims)) == (0, [-1, 16])


def test_a_given_batch_size_and_scheduler_stay(folder: Path) -> None:
    config = completed(folder, "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 5 }")
    assert config.max_batch_size == 8
    assert config.dynamic_batching.max_queue_delay_microseconds == 5
    assert not completed(folder, "max_batch_size: 8 sequence_batching { }").HasField("dynamic_batching")


def test_what_has_inputs_and_outputs_is_left_alone(folder: Path) -> None:
    config = completed(folder, IO)
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (0, False)


def test_a_model_that_cannot_batch(tmp_path: Path) -> None:
    folder = save(add_sub((2, 16)), tmp_path / "m")
    config = completed(folder)
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [2, 16])
    with pytest.raises(ValueError, match="autofill failed for model 'm': model does not support batching"):
        completed(folder, "max_batch_size: 8")


def test_a_batch_of_scalars_gets_a_dimension_and_a_reshape(tmp_path: Path) -> None:
    config = completed(save(identity(TensorProto.INT64, ("batch",)), tmp_path / "m"))
    assert list(config.input[0].dims) == [1]
    assert config.input[0].HasField("reshape")
    assert list(config.input[0].reshape.shape) == []


def test_a_sequence_cannot_be_completed(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("Y", TensorProto.FLOAT, None)
    made = model([helper.make_node("SequenceConstruct", ["X"], ["Y"])], tensors(["X"], [2]), [sequence])
    with pytest.raises(ValueError, match=r"'Y' is a seq\(tensor\(float\)\), which no request can carry"):
        completed(save(made, tmp_path / "m"))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"INPUT1"', '"OTHER"', "unexpected inference input 'OTHER', allowed inputs are: INPUT0, INPUT1"),
        ('"OUTPUT1"', '"OTHER"', "unexpected inference output 'OTHER', allowed outputs are: OUTPUT0, OUTPUT1"),
        (
            '"INPUT1" data_type: TYPE_FP32',
            '"INPUT1" data_type: TYPE_INT32',
            "configuration expects datatype TYPE_INT32",
        ),
        ('"OUTPUT1" data_type: TYPE_FP32', '"OUTPUT1" data_type: TYPE_STRING', "datatype TYPE_STRING for output"),
        ('"INPUT1" data_type: TYPE_FP32 dims: 16', '"INPUT1" data_type: TYPE_FP32 dims: 8', r"complete shape \[-1,8\]"),
        ('"OUTPUT1" data_type: TYPE_FP32 dims: 16', '"OUTPUT1" data_type: TYPE_FP32 dims: -1', r"shape \[-1,-1\]"),
        ("input {", 'input { name: "Z" data_type: TYPE_FP32 dims: 1 } input {', "expects 4 inputs, model provides 2"),
        ('"INPUT1" data', '"INPUT1" optional: true data', "configuration expects 1 inputs, model provides 2"),
    ],
)
def test_a_configuration_of_another_model_is_refused(folder: Path, old: str, new: str, match: str) -> None:
    refused(folder, "max_batch_size: 4" + IO.replace(old, new), match)


def test_dimensions_without_a_batch(folder: Path, tmp_path: Path) -> None:
    refused(folder, IO, r"expects 2 dimensions \(shape \[-1,16\]\) but the model configuration specifies 1 dimensions")
    fixed = save(add_sub((1, 16)), tmp_path / "fixed")
    refused(
        fixed, "max_batch_size: 4" + IO, r"the first dimension must be -1; but shape expected by the model is \[1,16"
    )


FIXED = """input { name: "X" data_type: TYPE_FP32 dims: [ 2, 3, 5 ] }
  output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 3, 4 ] }"""


def test_a_variable_dimension_may_be_fixed_for_an_input_and_not_for_an_output(tmp_path: Path) -> None:
    folder = save(identity(TensorProto.FLOAT, ("batch", "n")), tmp_path / "m")
    text = """max_batch_size: 4 input {{ name: "X" data_type: TYPE_FP32 dims: {} }}
      output {{ name: "Y" data_type: TYPE_FP32 dims: {} }}"""
    instance = load(OnnxRuntimeBackend({}), model_config(text.format(2, -1)), folder)
    assert run(instance, X=np.ones((1, 2), np.float32))["Y"].shape == (1, 2)
    refused(
        folder,
        text.format(2, 2),  # report onnxruntime_backend#165: as many dimensions, and no word of what differs
        r"tensor 'Y': the model expects 2 dimensions \(shape \[-1,-1\]\) .*; they differ in dimension 1: where the"
        r" model's is -1 that of an output is -1, too",
    )
    refused(
        save(identity(TensorProto.FLOAT, (1, 3, 4)), tmp_path / "fixed"), FIXED, r"; they differ in dimension 0, 2$"
    )


def test_an_optional_input_cannot_be_batched(tmp_path: Path) -> None:
    weights = helper.make_tensor("W", TensorProto.FLOAT, [2], [1, 2])
    text = """max_batch_size: 4 input { name: "X" data_type: TYPE_FP32 dims: 2 }
      input { name: "W" data_type: TYPE_FP32 dims: 2 optional: true }
      output { name: "Y" data_type: TYPE_FP32 dims: 2 }"""
    folder = save(add_weights(weights, overridable=True), tmp_path / "m")
    refused(folder, text, "optional input 'W' is not supported for models that support batching")


@pytest.mark.parametrize(
    ("parameter", "value", "match"),
    [
        ("intra_op_thread_count", "many", "'intra_op_thread_count' must be a whole number, not 'many'"),
        ("inter_op_thread_count", "-1", "'inter_op_thread_count' must be a whole number"),
        ("execution_mode", "2", "'execution_mode' must be one of 0, 1, not '2'"),
        ("enable_mem_arena", "perhaps", "'enable_mem_arena' must be 0 or 1"),
        ("share_session_between_instances", "2", "'share_session_between_instances' must be 0 or 1"),
        ("session.model_external_initializers_file_folder_path", "/", "_folder_path' is not supported"),
    ],
)
def test_parameters_that_cannot_be_are_named(folder: Path, parameter: str, value: str, match: str) -> None:
    refused(folder, f'parameters {{ key: "{parameter}" value {{ string_value: "{value}" }} }}', match)


def test_a_level_that_does_not_exist(folder: Path) -> None:
    refused(folder, "optimization { graph { level: 3 } }", "optimization.graph.level must be -1, 0, 1 or 2")


def parameters(**values: str) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()
    )


def test_options_reach_the_session() -> None:
    from onnxruntime import ExecutionMode, GraphOptimizationLevel

    text = parameters(intra_op_thread_count="3", inter_op_thread_count="2", execution_mode="1", enable_mem_arena="0")
    text += 'parameters { key: "session.intra_op.allow_spinning" value { string_value: "1" } }'
    found = options.session_options(model_config(text + "optimization { graph { level: 1 } }"), {})
    assert (found.intra_op_num_threads, found.inter_op_num_threads) == (3, 2)
    assert found.execution_mode == ExecutionMode.ORT_PARALLEL
    assert not found.enable_cpu_mem_arena
    assert found.graph_optimization_level == GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert found.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    assert found.get_session_config_entry("session.inter_op.allow_spinning") == "0"


def test_instances_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    for groups, count in (
        ("", 8),
        ("instance_group { count: 2 }", 4),
        ("instance_group { count: 3 gpus: [0, 1] }", 1),
    ):
        assert options.session_options(model_config(groups), {}).intra_op_num_threads == count


def test_one_pool_of_threads_for_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    made: list[tuple[int, int]] = []
    monkeypatch.setattr(options, "usable_cores", lambda: 8)
    monkeypatch.setattr(options, "_global_sizes", [])
    monkeypatch.setattr(onnxruntime, "set_global_thread_pool_sizes", lambda *sizes: made.append(sizes))
    backend_options = {"enable-global-threadpool": "1", "intra_op_thread_count": "3"}
    for _ in range(2):
        assert not options.session_options(model_config(), backend_options).use_per_session_threads
    assert made == [(3, 8)]


def test_arena_shrinkage_is_an_option_of_every_run() -> None:
    text = 'parameters { key: "memory.enable_memory_arena_shrinkage" value { string_value: "cpu:0" } }'
    found = options.run_options(model_config(text))
    assert found.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "cpu:0"


def test_instances_of_a_group_share_a_session_where_asked(folder: Path) -> None:
    backend = OnnxRuntimeBackend({})
    config = model_config(parameters(share_session_between_instances="true"))
    backend.auto_complete(config, folder)
    model = backend.load_model(model_context(config, folder))
    first, second, other = (
        model.load_instance(InstanceContext(name=name, kind="CPU")) for name in ("m_0_0", "m_0_1", "m_1_0")
    )
    sessions: list[Any] = [vars(instance)["_session"] for instance in (first, second, other)]
    assert sessions[0] is sessions[1]
    assert sessions[0] is not sessions[2]


def test_the_folder_form_and_another_file_name(tmp_path: Path) -> None:
    weights = external("W", "weights.bin")
    folder = save(add_weights(weights), tmp_path / "m", "model.onnx/model.onnx")
    (folder / "model.onnx" / "weights.bin").write_bytes(np.array([7, 8], np.float32).tobytes())
    array = np.array([1, 1], np.float32)
    assert run(load(OnnxRuntimeBackend({}), model_config(), folder), X=array)["Y"].tolist() == [8, 9]
    (folder / "model.onnx").rename(folder / "mine")
    named = model_config(default_model_filename="mine")
    assert run(load(OnnxRuntimeBackend({}), named, folder), X=array)["Y"].tolist() == [8, 9]


@pytest.mark.parametrize("link", ["weights.bin", "weights"])
def test_external_data_may_be_a_link(tmp_path: Path, link: str) -> None:
    """The repository has judged it by then."""
    path = "weights.bin" if link == "weights.bin" else "weights/0"
    folder = save(add_weights(external("W", path)), tmp_path / "m")
    stored = tmp_path / "store" / path
    stored.parent.mkdir(parents=True)
    stored.write_bytes(np.array([7, 8], np.float32).tobytes())
    (folder / link).symlink_to(tmp_path / "store" / link)
    served = load(OnnxRuntimeBackend({}), model_config(), folder)
    assert run(served, X=np.array([1, 1], np.float32))["Y"].tolist() == [8, 9]


@pytest.mark.parametrize("name", ["../2/model.onnx", "/model.onnx", "a/../../model.onnx"])
def test_a_file_name_stays_in_the_folder(folder: Path, name: str) -> None:
    refused(folder, f'default_model_filename: "{name}"', "leads out of the model's folder")


def test_no_file_and_no_model(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    refused(tmp_path / "m" / "1", "", "unable to find '1/model.onnx' for model 'm'")
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"no model")
    refused(tmp_path / "m" / "1", "", "'model.onnx' is not an ONNX model")
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"'model.onnx' cannot be loaded") as caught:
        completed(tmp_path / "m" / "1")
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    "location", ["../../secret.bin", "{root}/secret.bin", "x/../../../secret.bin", "link/../secret.bin"]
)
@pytest.mark.parametrize("within", ["initializer", "attribute", "branch"])
def test_external_data_stays_in_the_models_folder(tmp_path: Path, location: str, within: str) -> None:
    (tmp_path / "secret.bin").write_bytes(np.array([7, 8], np.float32).tobytes())
    weights = external("W", location.format(root=tmp_path))
    made = add_weights(weights)
    if within == "attribute":
        del made.graph.initializer[:]
        made.graph.node.insert(0, helper.make_node("Constant", [], ["W"], value=weights))
    if within == "branch":
        branch = made.graph.node.add(op_type="If").attribute.add(name="then_branch")
        branch.g.initializer.append(made.graph.initializer.pop())
    folder = save(made, tmp_path / "m")
    (tmp_path / "weights").mkdir()
    (folder / "link").symlink_to(tmp_path / "weights")
    refused(folder, "", "'model.onnx' has external data outside the model's folder")
    text = 'input { name: "X" data_type: TYPE_FP32 dims: 2 } output { name: "Y" data_type: TYPE_FP32 dims: 2 }'
    refused(folder, text, "'model.onnx' has external data outside the model's folder")


@pytest.mark.parametrize(
    ("text", "kind", "match"),
    [
        ("", "GPU", r"needs the CUDAExecutionProvider.*install onnxruntime-gpu in place of onnxruntime, or KIND_CPU"),
        ('cpu_execution_accelerator { name: "openvino" }', "CPU", "OpenVINOExecutionProvider.*onnxruntime-openvino"),
        ('gpu_execution_accelerator { name: "tensorrt" }', "GPU", "needs the TensorrtExecutionProvider"),
        ('gpu_execution_accelerator { name: "magic" }', "GPU", "unknown Execution Accelerator 'magic' is requested"),
        ('cpu_execution_accelerator { name: "magic" }', "CPU", "unknown Execution Accelerator 'magic' is requested"),
    ],
)
def test_a_missing_provider_is_named(folder: Path, text: str, kind: str, match: str) -> None:
    refused(folder, f"optimization {{ execution_accelerators {{ {text} }} }}", match, kind=kind)


class AnyProvider:
    @staticmethod
    def get_available_providers() -> list[str]:
        return [
            "TensorrtExecutionProvider",
            "CUDAExecutionProvider",
            "OpenVINOExecutionProvider",
            "CPUExecutionProvider",
        ]


def test_accelerators_are_providers_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", AnyProvider)
    text = """optimization { execution_accelerators {
      gpu_execution_accelerator { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" }
        parameters { key: "max_workspace_size_bytes" value: "1024" }
        parameters { key: "trt_engine_cache_enable" value: "1" } }
      gpu_execution_accelerator { name: "cuda" parameters { key: "use_tf32" value: "0" } } } }"""
    text += parameters(gpu_mem_limit="4096", cudnn_conv_algo_search="1", arena_extend_strategy="1")
    found = providers(model_config(text), InstanceContext(name="m_0_0", kind="GPU", device_id=3))
    assert found == [
        (
            "TensorrtExecutionProvider",
            {
                "trt_fp16_enable": "1",
                "trt_max_workspace_size": "1024",
                "trt_engine_cache_enable": "1",
                "device_id": "3",
            },
        ),
        (
            "CUDAExecutionProvider",
            {
                "use_tf32": "0",
                "gpu_mem_limit": "4096",
                "cudnn_conv_algo_search": "HEURISTIC",
                "arena_extend_strategy": "kSameAsRequested",
                "device_id": "3",
            },
        ),
        ("CPUExecutionProvider", {}),
    ]
    on_cpu = providers(model_config(text), InstanceContext(name="m_0_0", kind="CPU"))
    assert on_cpu == [("CPUExecutionProvider", {})], "a GPU's accelerators are not for instances on CPUs"


def test_a_provider_that_does_not_start_is_no_silent_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", AnyProvider.get_available_providers)
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        refused(folder, "", "onnxruntime could not start its CUDAExecutionProvider", kind="GPU")


def test_a_provider_that_fails_later_is_no_silent_cpu_either(folder: Path) -> None:
    session = vars(load(OnnxRuntimeBackend({}), model_config(), folder))["_session"]
    assert not vars(session)["_enable_fallback"]


def test_without_onnxruntime_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused(folder, "", r"ONNX models need the package onnxruntime .*pip install 'penstock-server\[onnx\]'")
