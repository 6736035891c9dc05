"""The fields of Triton's ModelConfig, and what becomes of each here: the table that checks walk and the docs explain.

A path leads through lists and maps to the fields of what they hold: `input.dims`, `model_warmup.inputs.zero_data`.
A path that is refused stands for everything below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from google.protobuf.message import Message

_TOKEN = re.compile(r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.+-]+|\S""")
_NAME_FOLLOWED_BY = re.compile(r"(?:\s|#[^\n]*\n)*[:{<\[]")


def field_lines(text: str) -> dict[str, int]:
    """Line numbers from 1 by path (`instance_group.count`); of a field that occurs several times, the first.

    The text has been parsed before: of what is not text format, nothing sensible is said, and nothing is raised.
    """
    lines: dict[str, int] = {}
    inside: list[str | None] = []
    """The fields whose messages a token is in; None for a list of them."""
    name: str | None = None
    line, position = 1, 0
    for match in _TOKEN.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        token = match.group()
        if token == "[":
            inside.append(None)
        elif token in ("{", "<"):
            inside.append(name)
        elif token in ("}", ">", "]"):
            name = (inside.pop() if inside else None) or name
        elif token.isidentifier() and _NAME_FOLLOWED_BY.match(text, match.end()):
            name = token
            lines.setdefault(".".join([*filter(None, inside), name]), line)
    return lines


class Fate(Enum):
    SUPPORTED = "supported"
    NO_EFFECT = "no effect"
    """A hint whose absence nobody's answers show: taken, reported in the configuration, otherwise unused."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Treatment:
    fate: Fate
    reason: str = ""
    """Of a refusal, for the one who reads the error."""
    only: frozenset[str] = frozenset()
    """Of a supported field: the backends that it means something to, if not to all; for others it is refused."""


def _supported(*paths: str, only: str = "") -> dict[str, Treatment]:
    treatment = Treatment(Fate.SUPPORTED, only=frozenset(only.split()))
    return dict.fromkeys(paths, treatment)


def _no_effect(*paths: str) -> dict[str, Treatment]:
    return dict.fromkeys(paths, Treatment(Fate.NO_EFFECT))


def _refused(reason: str, *paths: str) -> dict[str, Treatment]:
    return dict.fromkeys(paths, Treatment(Fate.REFUSED, reason))


_GENERAL = {
    **_supported("name", "platform", "backend", "max_batch_size", "default_model_filename"),
    **_supported("parameters", "parameters.string_value"),
    **_supported("model_transaction_policy", "model_transaction_policy.decoupled"),
    **_supported("version_policy", "version_policy.all"),
    **_supported("version_policy.latest", "version_policy.latest.num_versions"),
    **_supported("version_policy.specific", "version_policy.specific.versions"),
    **_supported("metric_tags"),
    **_supported("runtime", only="python pytorch"),
    **_refused("compiled models are chosen by default_model_filename alone", "cc_model_filenames"),
    **_refused("custom operator libraries are not loaded from a configuration", "model_operations"),
    **_refused("there are no repository agents", "model_repository_agents"),
    **_supported(
        "model_metrics",
        "model_metrics.metric_control",
        "model_metrics.metric_control.metric_identifier",
        "model_metrics.metric_control.metric_identifier.family",
        "model_metrics.metric_control.histogram_options",
        "model_metrics.metric_control.histogram_options.buckets",
    ),
    **_supported("response_cache", "response_cache.enable"),
}

_TENSORS = {
    **_supported("input", "input.name", "input.data_type", "input.dims", "input.optional"),
    **_supported("input.reshape", "input.reshape.shape"),
    **_no_effect("input.format"),
    **_supported("output", "output.name", "output.data_type", "output.dims", "output.label_filename"),
    **_supported("output.reshape", "output.reshape.shape"),
    **_refused("shape tensors are not passed", "input.is_shape_tensor", "output.is_shape_tensor"),
    **_supported(
        "input.allow_ragged_batch", only="dali onnxruntime openvino pytorch tensorflow tensorrt python identity"
    ),
    **_supported(
        "batch_input",
        "batch_input.kind",
        "batch_input.target_name",
        "batch_input.data_type",
        "batch_input.source_input",
        "batch_output",
        "batch_output.target_name",
        "batch_output.kind",
        "batch_output.source_input",
        only="onnxruntime openvino pytorch tensorflow tensorrt python identity",
    ),
    **_refused("tensors are in their linear format", "input.is_non_linear_format_io", "output.is_non_linear_format_io"),
}

_SCHEDULING = {
    **_supported(
        "dynamic_batching",
        "dynamic_batching.preferred_batch_size",
        "dynamic_batching.max_queue_delay_microseconds",
        "dynamic_batching.preserve_ordering",
        "dynamic_batching.priority_levels",
        "dynamic_batching.default_priority_level",
        "dynamic_batching.default_queue_policy",
        "dynamic_batching.default_queue_policy.timeout_action",
        "dynamic_batching.default_queue_policy.default_timeout_microseconds",
        "dynamic_batching.default_queue_policy.allow_timeout_override",
        "dynamic_batching.default_queue_policy.max_queue_size",
        "dynamic_batching.priority_queue_policy",
        "dynamic_batching.priority_queue_policy.timeout_action",
        "dynamic_batching.priority_queue_policy.default_timeout_microseconds",
        "dynamic_batching.priority_queue_policy.allow_timeout_override",
        "dynamic_batching.priority_queue_policy.max_queue_size",
    ),
    **_supported(
        "sequence_batching",
        "sequence_batching.max_sequence_idle_microseconds",
        "sequence_batching.iterative_sequence",
        "sequence_batching.direct",
        "sequence_batching.direct.max_queue_delay_microseconds",
        "sequence_batching.direct.minimum_slot_utilization",
        "sequence_batching.oldest",
        "sequence_batching.oldest.max_candidate_sequences",
        "sequence_batching.oldest.preferred_batch_size",
        "sequence_batching.oldest.max_queue_delay_microseconds",
        "sequence_batching.oldest.preserve_ordering",
        "sequence_batching.control_input",
        "sequence_batching.control_input.name",
        "sequence_batching.control_input.control",
        "sequence_batching.control_input.control.kind",
        "sequence_batching.control_input.control.int32_false_true",
        "sequence_batching.control_input.control.fp32_false_true",
        "sequence_batching.control_input.control.bool_false_true",
        "sequence_batching.control_input.control.data_type",
        "sequence_batching.state",
        "sequence_batching.state.input_name",
        "sequence_batching.state.output_name",
        "sequence_batching.state.data_type",
        "sequence_batching.state.dims",
        "sequence_batching.state.initial_state",
        "sequence_batching.state.initial_state.name",
        "sequence_batching.state.initial_state.data_type",
        "sequence_batching.state.initial_state.dims",
        "sequence_batching.state.initial_state.zero_data",
        "sequence_batching.state.initial_state.data_file",
    ),
    **_no_effect(
        "sequence_batching.state.use_same_buffer_for_input_output",
        "sequence_batching.state.use_growable_memory",
    ),
    **_supported(
        "ensemble_scheduling",
        "ensemble_scheduling.step",
        "ensemble_scheduling.step.model_name",
        "ensemble_scheduling.step.model_version",
        "ensemble_scheduling.step.input_map",
        "ensemble_scheduling.step.output_map",
        "ensemble_scheduling.max_inflight_requests",
    ),
    **_refused("models have no namespaces", "ensemble_scheduling.step.model_namespace"),
}

_INSTANCES = {
    **_supported("instance_group", "instance_group.name", "instance_group.kind", "instance_group.count"),
    **_supported("instance_group.gpus"),
    **_supported("instance_group.profile", only="tensorrt"),
    **_supported(
        "instance_group.rate_limiter",
        "instance_group.rate_limiter.resources",
        "instance_group.rate_limiter.resources.name",
        "instance_group.rate_limiter.resources.global",
        "instance_group.rate_limiter.resources.count",
        "instance_group.rate_limiter.priority",
    ),
    **_refused("there is no support for DLA", "instance_group.secondary_devices"),
    **_refused("every instance takes requests", "instance_group.passive"),
    **_refused("there are no host policies", "instance_group.host_policy"),
}

_OPTIMIZATION = {
    **_supported("optimization"),
    **_supported("optimization.graph", "optimization.graph.level", only="onnxruntime"),
    **_supported(
        "optimization.execution_accelerators",
        "optimization.execution_accelerators.gpu_execution_accelerator",
        "optimization.execution_accelerators.gpu_execution_accelerator.name",
        "optimization.execution_accelerators.gpu_execution_accelerator.parameters",
        "optimization.execution_accelerators.cpu_execution_accelerator",
        "optimization.execution_accelerators.cpu_execution_accelerator.name",
        "optimization.execution_accelerators.cpu_execution_accelerator.parameters",
        only="onnxruntime",
    ),
    **_no_effect(
        "optimization.priority",
        "optimization.cuda",
        "optimization.cuda.graphs",
        "optimization.cuda.busy_wait_events",
        "optimization.cuda.graph_spec",
        "optimization.cuda.graph_spec.batch_size",
        "optimization.cuda.graph_spec.input",
        "optimization.cuda.graph_spec.input.dim",
        "optimization.cuda.graph_spec.graph_lower_bound",
        "optimization.cuda.graph_spec.graph_lower_bound.batch_size",
        "optimization.cuda.graph_spec.graph_lower_bound.input",
        "optimization.cuda.graph_spec.graph_lower_bound.input.dim",
        "optimization.cuda.output_copy_stream",
        "optimization.input_pinned_memory",
        "optimization.input_pinned_memory.enable",
        "optimization.output_pinned_memory",
        "optimization.output_pinned_memory.enable",
        "optimization.gather_kernel_buffer_threshold",
        "optimization.eager_batching",
    ),
}

_WARMUP = _supported(
    "model_warmup",
    "model_warmup.name",
    "model_warmup.batch_size",
    "model_warmup.count",
    "model_warmup.inputs",
    "model_warmup.inputs.data_type",
    "model_warmup.inputs.dims",
    "model_warmup.inputs.zero_data",
    "model_warmup.inputs.random_data",
    "model_warmup.inputs.input_data_file",
)

FIELDS: dict[str, Treatment] = _GENERAL | _TENSORS | _SCHEDULING | _INSTANCES | _OPTIMIZATION | _WARMUP

_CLASSIC = frozenset(
    {"dali", "fil", "identity", "onnxruntime", "openvino", "python", "pytorch", "tensorflow", "tensorrt"}
)
OWN_BACKENDS = _CLASSIC | {"openai", "penstock", "vllm", "tensorrtllm"}
"""Those of this package. What a field means to others is theirs to say: `Treatment.only` is not held against them."""

SELF_PLACED_BACKENDS = frozenset({"openai", "penstock", "vllm", "tensorrtllm"})
"""Backends of language models: they choose their devices themselves (KIND_MODEL), and have no response cache."""


def set_paths(message: Message, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that differ from their defaults; below a refused one nothing is looked at."""
    for field, value in message.ListFields():
        path = prefix + field.name
        yield path
        treatment = FIELDS.get(path)
        if field.message_type is None or treatment is None or treatment.fate is Fate.REFUSED:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is None:
                continue
            inner = list(value.values())
        else:
            inner = list(value) if field.is_repeated else [value]
        for item in inner:
            yield from set_paths(item, f"{path}.")
