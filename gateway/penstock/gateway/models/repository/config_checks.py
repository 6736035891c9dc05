"""Checks of a whole configuration: every field is looked up, none is ignored; the rules of
Triton's core, in its words, and bounds of our own."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from penstock.classic.batching.sequences.controls import server_inputs
from penstock.classic.ensemble.plan import PLATFORM, is_ensemble, make_plan
from penstock.classic.model_config import (
    DataType,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelQueuePolicy,
)
from penstock.classic.model_files import check_file_name
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.metrics.triton import FIRST_RESPONSE
from penstock.gateway.models.repository.batching_checks import check_batch_tensors, check_sequences
from penstock.gateway.models.repository.config_fields import FIELDS, OWN_BACKENDS, SELF_PLACED_BACKENDS, Fate, set_paths

MAX_PRIORITY_LEVELS = 1024
MAX_INSTANCES = 1024
"""Of one group and device. Both bounds are far above use, and keep a slip of the pen from taking all memory."""
MAX_RESOURCE_NAME = 256

_PLATFORMS = {
    "tensorrt": ("tensorrt_plan",),
    "onnxruntime": ("onnxruntime_onnx",),
    "pytorch": ("pytorch_libtorch",),
    "tensorflow": ("tensorflow_savedmodel", "tensorflow_graphdef"),
}
_TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_]*")
"""What makes a label behind the underscore that Triton puts before it; Prometheus keeps names with two for itself."""
_MAX_BUCKETS = 1000
_VALID_TYPES = frozenset(DataType.values()) - {DataType.TYPE_INVALID}


def check_model(config: ModelConfig) -> None:
    """What concerns the model as a whole. Raises InvalidRequestError."""
    name = config.name
    if is_ensemble(config):
        _check_ensemble(config)
    elif not config.backend:
        raise InvalidRequestError(f"unexpected platform type '{config.platform}' for {name}")
    if config.backend in _PLATFORMS and config.platform not in _PLATFORMS[config.backend]:
        raise InvalidRequestError(
            f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend} for {name}"
        )
    if config.max_batch_size < 0:
        raise InvalidRequestError(f"'max_batch_size' must be non-negative value for {name}")
    for tag in config.metric_tags:
        if not _TAG.fullmatch(tag):
            raise InvalidRequestError(f"metric tag '{tag[:64]}' cannot be the name of a label for {name}")
    _check_model_metrics(config)
    if config.default_model_filename:
        check_file_name("default_model_filename", config.default_model_filename)
    if config.HasField("dynamic_batching"):
        _check_dynamic_batching(config.dynamic_batching, config)
    for group in config.instance_group:
        _check_group(group, config)
    if config.backend in SELF_PLACED_BACKENDS:
        _check_no_rate_limits(config)
    if config.response_cache.enable:
        _check_response_cache(config)


def _check_model_metrics(config: ModelConfig) -> None:
    for control in config.model_metrics.metric_control:
        family, buckets = control.metric_identifier.family, control.histogram_options.buckets
        subject = f"model_metrics of model '{config.name}'"
        if family != FIRST_RESPONSE:
            raise InvalidRequestError(f"{subject}: buckets are chosen for {FIRST_RESPONSE} alone, not '{family[:64]}'")
        if not 0 < len(buckets) <= _MAX_BUCKETS:
            raise InvalidRequestError(f"{subject}: {family} needs 1 to {_MAX_BUCKETS} buckets")
        if not all(map(math.isfinite, buckets)) or list(buckets) != sorted(set(buckets)):
            raise InvalidRequestError(f"{subject}: the buckets of {family} must be ascending numbers")


def _check_no_rate_limits(config: ModelConfig) -> None:
    if any(group.HasField("rate_limiter") for group in config.instance_group):
        raise UnsupportedError(
            f"instance_group.rate_limiter of model '{config.name}' is not supported: language models have the bounds of"
            " their scheduler instead",
            param="instance_group.rate_limiter",
        )


def _check_response_cache(config: ModelConfig) -> None:
    if config.backend in SELF_PLACED_BACKENDS:
        raise UnsupportedError(
            f"response_cache.enable of model '{config.name}' is not supported: language models have a prefix cache"
            " instead",
            param="response_cache.enable",
        )
    if config.model_transaction_policy.decoupled:
        raise InvalidRequestError(
            f"Response Cache does not currently support model {config.name} with 'Decoupled' transaction policy. Please"
            " disable the response cache."
        )


def _check_ensemble(config: ModelConfig) -> None:
    name = config.name
    if config.platform != PLATFORM:
        raise InvalidRequestError(
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}"
        )
    for field in ("backend", "runtime", "default_model_filename", "instance_group", "model_warmup"):
        if getattr(config, field):
            raise InvalidRequestError(f"{field} should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise InvalidRequestError(f"optimization should not be specified for ensemble '{name}'")
    make_plan(config)


def _check_dynamic_batching(batching: ModelDynamicBatching, config: ModelConfig) -> None:
    name = config.name
    for size in batching.preferred_batch_size:
        if size <= 0:
            raise InvalidRequestError(f"dynamic batching preferred size must be positive for {name}")
        if size > config.max_batch_size:
            raise InvalidRequestError(
                f"dynamic batching preferred size must be <= max batch size for {name}: {size} is above max_batch_size"
                f" {config.max_batch_size}"
            )
    levels = batching.priority_levels
    if levels > MAX_PRIORITY_LEVELS:
        raise InvalidRequestError(f"priority levels must be at most {MAX_PRIORITY_LEVELS} for {name}")
    if levels:
        if not 1 <= batching.default_priority_level <= levels:
            raise InvalidRequestError(f"default priority level must be in range [1, {levels}] for {name}")
        if not all(1 <= level <= levels for level in batching.priority_queue_policy):
            raise InvalidRequestError(
                f"priority queue policy must have priority level in range [1, {levels}] for {name}"
            )
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(policy.timeout_action not in ModelQueuePolicy.TimeoutAction.values() for policy in policies):
        raise InvalidRequestError(f"unknown timeout action of a queue policy for {name}")
    if batching.preserve_ordering:
        if levels > 1:
            raise InvalidRequestError(f"Only one priority level is allowed when 'preserve_ordering' is true for {name}")
        if any(_delays(policy) for policy in policies):
            raise InvalidRequestError(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
            )


def _delays(policy: ModelQueuePolicy) -> bool:
    return bool(policy.default_timeout_microseconds) and bool(policy.timeout_action == ModelQueuePolicy.DELAY)


def _check_group(group: ModelInstanceGroup, config: ModelConfig) -> None:
    subject = f"instance group {group.name} of model {config.name}"
    if group.count > MAX_INSTANCES:
        raise InvalidRequestError(f"{subject} asks for {group.count} instances, the most is {MAX_INSTANCES}")
    if group.kind in (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL):
        if group.gpus:
            kind = ModelInstanceGroup.Kind.Name(group.kind)
            raise InvalidRequestError(f"{subject} has kind {kind} but specifies one or more GPUs")
    elif group.kind == ModelInstanceGroup.KIND_GPU:
        if not group.gpus:
            raise InvalidRequestError(f"{subject} has kind KIND_GPU but no GPUs are available")
        if len(set(group.gpus)) != len(group.gpus) or min(group.gpus) < 0:
            raise InvalidRequestError(f"{subject} specifies invalid or unsupported gpu id, or one of them twice")
    elif group.kind != ModelInstanceGroup.KIND_AUTO:
        raise InvalidRequestError(f"{subject} has an unknown kind")
    for resource in group.rate_limiter.resources:
        if not resource.name.isprintable() or len(resource.name) > MAX_RESOURCE_NAME:
            raise InvalidRequestError(f"{subject} has a rate limiter resource whose name is too long or not printable")
    for profile in group.profile:
        if not (profile.isascii() and profile.isdigit()):
            raise InvalidRequestError(f"{subject} specifies an invalid profile: a non-negative integer is expected")


def check_tensors(config: ModelConfig, *, complete: bool) -> None:
    """Inputs and outputs; while they are not `complete`, datatypes and dims may be missing.

    Raises InvalidRequestError.
    """
    for kind, tensors in (("input", config.input), ("output", config.output)):
        twice = [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]
        if twice:
            raise InvalidRequestError(f"model {kind} '{twice[0]}' is specified more than once for {config.name}")
        for tensor in tensors:
            _check_tensor(tensor, f"model {kind} ", config, complete)
    for tensor in config.input:
        if tensor.format != ModelInput.FORMAT_NONE and complete and len(tensor.dims) != 3:
            raise InvalidRequestError(f"model input NHWC/NCHW require 3 dims for {config.name}")
    for tensor in config.output:
        if tensor.label_filename:
            check_file_name("label_filename", tensor.label_filename)


def _check_tensor(tensor: ModelInput | ModelOutput, prefix: str, config: ModelConfig, complete: bool) -> None:
    suffix = f" for {config.name}"
    if not tensor.name:
        raise InvalidRequestError(f"{prefix}must specify 'name'{suffix}")
    prefix = f"{prefix}'{tensor.name}' "
    if tensor.data_type not in _VALID_TYPES and (complete or tensor.data_type != DataType.TYPE_INVALID):
        raise InvalidRequestError(f"{prefix}must specify 'data_type'{suffix}")
    if not tensor.dims and complete:
        raise InvalidRequestError(f"{prefix}must specify 'dims'{suffix}")
    _check_dims(tensor.dims, f"{prefix}dimension", suffix)
    if tensor.HasField("reshape") and tensor.dims:
        if not tensor.reshape.shape and config.max_batch_size == 0:
            raise InvalidRequestError(
                f"{prefix}cannot have empty reshape for non-batching model as scalar tensors are not supported{suffix}"
            )
        _check_dims(tensor.reshape.shape, f"{prefix}reshape dimensions", suffix)
        _check_reshape(tensor.dims, tensor.reshape.shape, prefix, suffix)


def _check_dims(dims: Sequence[int], subject: str, suffix: str) -> None:
    if any(dim < 1 and dim != -1 for dim in dims):
        raise InvalidRequestError(
            f"{subject} must be integer >= 1, or -1 to indicate a variable-size dimension{suffix}"
        )


def _check_reshape(dims: Sequence[int], shape: Sequence[int], prefix: str, suffix: str) -> None:
    """Between variable dims there must be as many elements in one as in the other: [2, 4, -1, 6] and [8, -1, 1, 6]."""
    ours, theirs = _counts(dims), _counts(shape)
    if -1 in dims and -1 in shape and len(ours) != len(theirs):
        raise InvalidRequestError(
            f"{prefix}has different number of variable-size dimensions for dims and reshape{suffix}"
        )
    if ours != theirs:
        raise InvalidRequestError(f"{prefix}has different size for dims and reshape{suffix}")


def _counts(dims: Sequence[int]) -> list[int]:
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [math.prod(run) for run in runs]


def check_warmup(config: ModelConfig, *, complete: bool) -> None:
    """Warm-up samples against the model's inputs. Raises InvalidRequestError."""
    known = {tensor.name for tensor in (*config.input, *server_inputs(config))}
    for sample in config.model_warmup:
        subject = f"warmup sample '{sample.name}'"
        if sample.batch_size > max(1, config.max_batch_size) and complete:
            raise InvalidRequestError(
                f"failed to run {subject}: batch size {sample.batch_size} for '{config.name}', max allowed is"
                f" {config.max_batch_size}"
            )
        for name, data in sample.inputs.items():
            if complete and name not in known:
                raise InvalidRequestError(f"{subject} of '{config.name}' has an unknown input '{name}'")
            source = data.WhichOneof("input_data_type")
            if source is None:
                raise InvalidRequestError(f"warmup setting expects input '{name}' to have input_data_type set")
            if data.data_type not in _VALID_TYPES:
                raise InvalidRequestError(f"{subject} of '{config.name}': input '{name}' must specify 'data_type'")
            if any(dim == -1 for dim in data.dims):
                raise InvalidRequestError(
                    f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
                )
            if any(dim < 1 for dim in data.dims):
                raise InvalidRequestError(f"{subject} of '{config.name}': input '{name}' has a dimension below 1")
            if source == "input_data_file":
                check_file_name("input_data_file", data.input_data_file)


def check_supported(config: ModelConfig, *, complete: bool = True) -> None:
    """Refuses what is not supported, by name, and what cannot be, in Triton's words.

    Call it on what `defaults.complete` has filled in. Until the backend has had its turn as well, `complete=False` lets
    datatypes and dims be missing.

    Raises UnsupportedError for a field, InvalidRequestError for its value.
    """
    _check_no_engines(config)
    for path in sorted(set_paths(config)):
        treatment = FIELDS.get(path)
        if treatment is None or treatment.fate is Fate.REFUSED:
            reason = treatment.reason if treatment else "this server does not know the field"
            raise UnsupportedError(f"{path} of model '{config.name}' is not supported: {reason}", param=path)
        if treatment.only and config.backend in OWN_BACKENDS - treatment.only:
            raise UnsupportedError(_only_for(path, config, treatment.only), param=path)
    try:
        check_model(config)
        check_tensors(config, complete=complete)
        check_batch_tensors(config, complete=complete)
        check_sequences(config)
        check_warmup(config, complete=complete)
    except InvalidRequestError as error:
        raise type(error)(_printable(error.message), param=error.param) from None


_ENGINE_PARAMETERS = ("gpt_model_type", "gpt_model_path", "engine_dir", "batching_strategy", "encoder_model_path")
"""Those by which a configuration of TensorRT-LLM's in-flight batcher backend is known."""


def _check_no_engines(config: ModelConfig) -> None:
    """Says at once what is the matter, before one of the many fields that come with it is found to be unsupported."""
    if config.backend == "tensorrtllm" and any(name in config.parameters for name in _ENGINE_PARAMETERS):
        raise UnsupportedError(
            f"model '{config.name}' is made for TensorRT engines (inflight_batcher_llm), which are not served: write "
            "one of the LLM API layout, whose model.yaml names the Hugging Face model (docs/model_repository.md)",
            param="parameters",
        )


def _only_for(path: str, config: ModelConfig, backends: frozenset[str]) -> str:
    names = ", ".join(sorted(backends))
    return f"{path} of model '{config.name}' is not supported: only for the backend {names}, not {config.backend}"


def _printable(text: str) -> str:
    """Names in a configuration may hold anything; messages go into logs."""
    return "".join(char if char.isprintable() else "?" for char in text)[:512]
