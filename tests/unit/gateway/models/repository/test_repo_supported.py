"""Every field of ModelConfig has its place in the table, and what the table refuses is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from hypothesis import given
from hypothesis import strategies as st

from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import check_file_name
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.models.repository.config_checks import MAX_INSTANCES, MAX_PRIORITY_LEVELS, check_supported
from penstock.gateway.models.repository.config_fields import FIELDS, OWN_BACKENDS, Fate, field_lines, set_paths
from penstock.gateway.models.repository.defaults import complete

BACKEND = 'backend: "python" '
TENSOR = "data_type: TYPE_FP32 dims: [ 4 ]"
IO = f"input [ {{ name: 'I' {TENSOR} }} ] output [ {{ name: 'O' {TENSOR} }} ] "
BATCH = BACKEND + IO + "max_batch_size: 4 "
SEQUENCES = """sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
  state { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 4 ] }
}"""


def config(text: str, *, gpus: int = 0) -> ModelConfig:
    found = text_format.Parse(text, ModelConfig())
    complete(found, "m", Path("/nonexistent"), gpus=gpus)
    return found


def paths(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    for field in descriptor.fields:
        path = prefix + field.name
        yield path
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is not None and not (path in FIELDS and FIELDS[path].fate is Fate.REFUSED):
            yield from paths(inner, f"{path}.")


def test_every_field_of_the_schema_is_in_the_table() -> None:
    known = set(paths(ModelConfig.DESCRIPTOR))
    assert known - set(FIELDS) == set(), "new fields of ModelConfig: decide what becomes of them"
    assert set(FIELDS) - known == set(), "fields that ModelConfig does not have"


@pytest.mark.parametrize("backend", ["vllm", "tensorrtllm", "penstock"])
def test_language_models_have_no_response_cache(backend: str) -> None:
    with pytest.raises(UnsupportedError, match="language models have a prefix cache instead"):
        check_supported(config(f'backend: "{backend}" {IO} response_cache {{ enable: true }}'))


@pytest.mark.parametrize("backend", ["vllm", "tensorrtllm", "penstock"])
def test_language_models_have_no_rate_limits(backend: str) -> None:
    with pytest.raises(UnsupportedError, match="language models have the bounds of their scheduler instead"):
        check_supported(config(f'backend: "{backend}" {IO} instance_group {{ rate_limiter {{ priority: 2 }} }}'))


def test_refusals_have_reasons() -> None:
    assert [
        path for path, treatment in FIELDS.items() if (treatment.fate is Fate.REFUSED) != bool(treatment.reason)
    ] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "ensemble_scheduling.step.model_namespace",
            "ensemble_scheduling { step [ { model_name: 'x' model_namespace: 'y' } ] }",
        ),
        ("instance_group.secondary_devices", "instance_group [ { secondary_devices { device_id: 1 } } ]"),
        ("instance_group.passive", "instance_group [ { }, { passive: true } ]"),
        ("instance_group.host_policy", 'instance_group [ { host_policy: "numa_0" } ]'),
        ("instance_group.profile", 'instance_group [ { profile: "0" } ]'),
        ("model_repository_agents", "model_repository_agents { agents [ { name: 'checksum' } ] }"),
        ("input.is_shape_tensor", "input [ { name: 'R' is_shape_tensor: true } ]"),
        ("output.is_shape_tensor", "output [ { name: 'R' is_shape_tensor: true } ]"),
        ("input.is_non_linear_format_io", "input [ { name: 'R' is_non_linear_format_io: true } ]"),
        ("output.is_non_linear_format_io", "output [ { name: 'R' is_non_linear_format_io: true } ]"),
        ("model_operations", "model_operations { op_library_filename: 'x.so' }"),
        ("cc_model_filenames", "cc_model_filenames { key: '8.0' value: 'm.plan' }"),
        ("optimization.graph", "optimization { graph { level: 1 } }"),
        (
            "optimization.execution_accelerators",
            "optimization { execution_accelerators { cpu_execution_accelerator [ { name: 'openvino' } ] } }",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(path: str, text: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{re.escape(path)} of model 'm' is not supported: ") as caught:
        check_supported(config(BACKEND + IO + text))
    assert caught.value.param == path


def test_a_runtime_is_for_python_models() -> None:
    check_supported(config(BACKEND + IO + "runtime: 'model.py'"))
    with pytest.raises(UnsupportedError, match=r"^runtime of model 'm' is not supported"):
        check_supported(config("backend: 'identity' " + IO + "runtime: 'model.py'"))


@pytest.mark.parametrize("tag", ["a b", "a-b", "", "_a"])
def test_metric_tags_are_labels(tag: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be the name of a label"):
        check_supported(config(BACKEND + IO + f"metric_tags {{ key: '{tag}' value: 'b' }}"))


FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


def metric_control(family: str, buckets: str) -> str:
    control = f"metric_identifier {{ family: '{family}' }} histogram_options {{ buckets: [ {buckets} ] }}"
    return f"model_metrics {{ metric_control [ {{ {control} }} ] }}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (metric_control("nv_inference_count", "1"), "buckets are chosen for nv_inference_first_response_histogram_ms"),
        (metric_control(FIRST_RESPONSE, ""), "needs 1 to 1000 buckets"),
        (metric_control(FIRST_RESPONSE, "2, 1"), "must be ascending numbers"),
        (metric_control(FIRST_RESPONSE, "1, 1"), "must be ascending numbers"),
        (metric_control(FIRST_RESPONSE, "1, nan"), "must be ascending numbers"),
        (metric_control(FIRST_RESPONSE, "1, inf"), "must be ascending numbers"),
    ],
)
def test_mistakes_in_buckets(text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        check_supported(config(BACKEND + IO + text))


def test_all_refused_fields_are_tried_above() -> None:
    tried = {
        mark.args[1][i][0]
        for mark in test_what_is_not_supported_is_refused_by_name.pytestmark
        for i in range(len(mark.args[1]))
    }
    assert {path for path, treatment in FIELDS.items() if treatment.fate is Fate.REFUSED} - tried == set()


@pytest.mark.parametrize(
    "text",
    [
        "response_cache { enable: true }",
        "optimization { priority: PRIORITY_MAX cuda { graphs: true graph_spec [ { batch_size: 1 } ] } }",
        "optimization { input_pinned_memory { enable: false } gather_kernel_buffer_threshold: 4 eager_batching: true }",
        metric_control(FIRST_RESPONSE, "-1, 0, 2.5"),
        "metric_tags { key: 'model' value: 'b' } metric_tags { key: '1' value: 'b' }",
        "parameters { key: 'a' value { string_value: 'b' } }",
        "model_transaction_policy { decoupled: true } version_policy { all { } }",
        "dynamic_batching { }",
        "instance_group [ { kind: KIND_CPU count: 3 } ]",
        "instance_group [ { rate_limiter { resources [ { name: 'R' global: true count: 1 } ] priority: 2 } } ]",
        f"model_warmup [ {{ batch_size: 1 count: 2 inputs {{ key: 'I' value {{ {TENSOR} zero_data: true }} }} }} ]",
        f"model_warmup [ {{ inputs {{ key: 'I' value {{ {TENSOR} input_data_file: 'data/raw' }} }} }} ]",
        SEQUENCES
        + " model_warmup { inputs { key: 'START' value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }"
        " inputs { key: 'ID' value { data_type: TYPE_UINT64 dims: [ 1 ] random_data: true } }"
        f" inputs {{ key: 'S' value {{ {TENSOR} zero_data: true }} }} }}",
    ],
)
def test_what_is_supported_or_harmless_passes(text: str) -> None:
    check_supported(config(BACKEND + IO + text))


@pytest.mark.parametrize("backend", ["onnxruntime", "third_party"])
def test_fields_of_one_backend_pass_there_and_with_unknown_backends(backend: str) -> None:
    check_supported(config(f"backend: '{backend}' {IO} optimization {{ graph {{ level: -1 }} }}"))


@pytest.mark.parametrize("backend", sorted(OWN_BACKENDS))
def test_every_backend_may_have_kind_model(backend: str) -> None:
    platform = {"onnxruntime": "onnxruntime_onnx", "pytorch": "pytorch_libtorch", "tensorrt": "tensorrt_plan"}
    platform["tensorflow"] = "tensorflow_savedmodel"
    text = f"backend: '{backend}' platform: '{platform.get(backend, '')}' instance_group [ {{ kind: KIND_MODEL }} ]"
    check_supported(config(text))


REFUSED = [
    (BACKEND + IO + "max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
    ('platform: "caffe2_netdef"', "unexpected platform type 'caffe2_netdef' for m"),
    (
        'platform: "tensorrt_plan" backend: "onnxruntime"',
        "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime for m",
    ),
    (
        BATCH + "dynamic_batching { preferred_batch_size: 8 }",
        "dynamic batching preferred size must be <= max batch size for m: 8 is above max_batch_size 4",
    ),
    (
        BACKEND + IO + "dynamic_batching { preferred_batch_size: 2 }",  # report onnxruntime_backend#148
        "dynamic batching preferred size must be <= max batch size for m: 2 is above max_batch_size 0",
    ),
    (BATCH + "dynamic_batching { preferred_batch_size: 0 }", "dynamic batching preferred size must be positive for m"),
    (BATCH + "dynamic_batching { priority_levels: 2 }", "default priority level must be in range [1, 2] for m"),
    (
        BATCH + "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 } }",
        "priority queue policy must have priority level in range [1, 2] for m",
    ),
    (
        BATCH + f"dynamic_batching {{ priority_levels: {2**63} default_priority_level: 1 }}",
        f"priority levels must be at most {MAX_PRIORITY_LEVELS} for m",
    ),
    (
        BATCH + "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
        "Only one priority level is allowed when 'preserve_ordering' is true for m",
    ),
    (
        BATCH + "dynamic_batching { preserve_ordering: true "
        "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
    (
        BATCH + "dynamic_batching { default_queue_policy { timeout_action: 7 } }",
        "unknown timeout action of a queue policy for m",
    ),
    (
        BACKEND + "instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]",
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
    (
        BACKEND + "instance_group [ { kind: KIND_GPU } ]",
        "instance group m_0 of model m has kind KIND_GPU but no GPUs are available",
    ),
    (
        BACKEND + "instance_group [ { kind: KIND_GPU gpus: [ 1, 1 ] } ]",
        "instance group m_0 of model m specifies invalid or unsupported gpu id, or one of them twice",
    ),
    (BACKEND + "instance_group [ { kind: 9 } ]", "instance group m_0 of model m has an unknown kind"),
    (
        BACKEND + "instance_group [ { count: 100000 } ]",
        f"instance group m_0 of model m asks for 100000 instances, the most is {MAX_INSTANCES}",
    ),
    (
        BACKEND + "instance_group [ { rate_limiter { resources [ { name: 'a\\nb' } ] } } ]",
        "instance group m_0 of model m has a rate limiter resource whose name is too long or not printable",
    ),
    (
        "backend: 'vllm' instance_group [ { kind: KIND_MODEL gpus: [ 0 ] } ]",
        "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs",
    ),
    (
        "backend: 'tensorrt' instance_group [ { profile: '-1' } ]",
        "instance group m_0 of model m specifies an invalid profile: a non-negative integer is expected",
    ),
    (
        BACKEND + "default_model_filename: '../x'",
        "default_model_filename must be a relative path inside the model's folder",
    ),
]


def tensor(text: str, batch: int = 0) -> str:
    return f"{BACKEND} max_batch_size: {batch} input [ {{ {text} }} ]"


TENSORS = [
    (tensor("data_type: TYPE_FP32 dims: [ 1 ]"), "model input must specify 'name' for m"),
    (tensor("name: 'I' dims: [ 1 ]"), "model input 'I' must specify 'data_type' for m"),
    (tensor("name: 'I' data_type: 99 dims: [ 1 ]"), "model input 'I' must specify 'data_type' for m"),
    (tensor("name: 'I' data_type: TYPE_FP32"), "model input 'I' must specify 'dims' for m"),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ 0 ]"),
        "model input 'I' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ -2 ] }", 4),
        "model input 'I' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ 1 ] reshape { }"),
        "model input 'I' cannot have empty reshape for non-batching model as scalar tensors are not supported for m",
    ),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 3 ] }", 4),
        "model input 'I' has different size for dims and reshape for m",
    ),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ 2 ] reshape { }", 4),
        "model input 'I' has different size for dims and reshape for m",
    ),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ 3 ] }", 4),
        "model input 'I' has different size for dims and reshape for m",
    ),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ -1, -1 ] }", 4),
        "model input 'I' has different number of variable-size dimensions for dims and reshape for m",
    ),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ 4 ] format: FORMAT_NHWC"),
        "model input NHWC/NCHW require 3 dims for m",
    ),
    (
        tensor("name: 'I' data_type: TYPE_FP32 dims: [ 1 ] }, { name: 'I' data_type: TYPE_FP32 dims: [ 1 ]"),
        "model input 'I' is specified more than once for m",
    ),
    (BACKEND + "output [ { name: 'O' data_type: TYPE_FP32 } ]", "model output 'O' must specify 'dims' for m"),
    (
        BACKEND + "output [ { name: 'O' data_type: TYPE_FP32 dims: [ 1 ] label_filename: '/etc/passwd' } ]",
        "label_filename must be a relative path inside the model's folder",
    ),
]


def warmup(text: str, sample: str = "batch_size: 1") -> str:
    return f"{BATCH} model_warmup [ {{ name: 'w' {sample} inputs {{ key: 'I' value {{ {text} }} }} }} ]"


WARMUPS = [
    (warmup("data_type: TYPE_FP32 dims: [ 4 ]"), "warmup setting expects input 'I' to have input_data_type set"),
    (
        warmup("data_type: TYPE_FP32 dims: [ -1 ] zero_data: true"),
        "warmup setting expects all variable-size dimensions are specified for input 'I'",
    ),
    (warmup("dims: [ 4 ] zero_data: true"), "warmup sample 'w' of 'm': input 'I' must specify 'data_type'"),
    (
        warmup("data_type: TYPE_FP32 dims: [ 0 ] zero_data: true"),
        "warmup sample 'w' of 'm': input 'I' has a dimension below 1",
    ),
    (
        warmup("data_type: TYPE_FP32 dims: [ 4 ] zero_data: true", "batch_size: 5"),
        "failed to run warmup sample 'w': batch size 5 for 'm', max allowed is 4",
    ),
    (
        warmup("data_type: TYPE_FP32 input_data_file: '../../etc/passwd'"),
        "input_data_file must be a relative path inside the model's folder",
    ),
    (
        BATCH + f"model_warmup [ {{ name: 'w' inputs {{ key: 'X' value {{ {TENSOR} random_data: true }} }} }} ]",
        "warmup sample 'w' of 'm' has an unknown input 'X'",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED + TENSORS + WARMUPS)
def test_what_cannot_be_is_refused_in_tritons_words(text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_supported(config(text))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ([4], [2, 2]),
        ([1], []),
        ([2, 4, -1, 6], [8, -1, 1, 6]),
        ([-1], [-1]),
        ([-1, -1], [1, -1, -1]),
    ],
)
def test_reshapes_of_equal_size(dims: list[int], shape: list[int]) -> None:
    check_supported(config(tensor(f"name: 'I' data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {shape} }}", 4)))


def test_before_auto_completion_tensors_may_be_incomplete() -> None:
    found = config(
        BACKEND
        + f"input [ {{ name: 'I' }} ] model_warmup [ {{ inputs {{ key: 'J' value {{ {TENSOR} zero_data: true }} }} }} ]"
    )
    check_supported(found, complete=False)
    with pytest.raises(InvalidRequestError, match="must specify 'data_type'"):
        check_supported(found)


def test_messages_do_not_carry_control_characters() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_supported(config(BACKEND + "input [ { name: 'a\\r\\nb' } ]"))
    assert caught.value.message == "model input 'a??b' must specify 'data_type' for m"


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b.txt", "a\n", "..."]), max_size=4).map("/".join))
def test_a_file_name_that_passes_stays_in_its_folder(path: str) -> None:
    try:
        check_file_name("field", path)
    except InvalidRequestError:
        return
    assert Path("/model").joinpath(path).resolve().is_relative_to("/model")
    assert path


def test_a_file_name_that_no_file_system_has_is_refused() -> None:
    check_file_name("field", "a" * 255)
    for path in ("a" * 256, "folder/" + "ä" * 128):
        with pytest.raises(InvalidRequestError, match="inside the model's folder"):
            check_file_name("field", path)


TEXT = """name: "a" # backend: {
backend: "python"
input [
  { name: "I" data_type: TYPE_FP32
    dims: [ 1, 2 ] },
  { name: 'J' dims: [ 4 ]
    reshape: { shape: [ ] } }
]
instance_group { count: 2
  rate_limiter { resources [ { name: "r"
    count: 4 } ] }
}
parameters: { key: "x: {" value: { string_value: "a: b { \\" c: 1" } }
response_cache <
  enable: true >
max_batch_size:
  8
"""


def test_the_first_line_of_each_field() -> None:
    lines = field_lines(TEXT)
    assert lines["backend"] == 2
    assert (lines["input"], lines["input.name"], lines["input.dims"], lines["input.reshape"]) == (3, 4, 5, 7)
    assert lines["instance_group.rate_limiter.resources.count"] == 11
    assert (lines["parameters"], lines["parameters.value.string_value"]) == (13, 13)
    assert lines["response_cache.enable"] == 15
    assert lines["max_batch_size"] == 16
    assert not {"x", "a", "b", "c"} & set(lines), "what stands in texts and comments is no field"


def test_every_field_that_protobuf_finds_is_found() -> None:
    config = text_format.Parse(TEXT, ModelConfig())
    paths = {path for path in set_paths(config) if not path.startswith("parameters")}
    assert paths - set(field_lines(TEXT)) == set()


@given(st.text(alphabet='a:{}[]<>"\\#\n ,;1', max_size=60))
def test_whatever_it_is_given_it_raises_nothing(text: str) -> None:
    lines = field_lines(text)
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())
