"""Values that Triton fills into a configuration by itself, from the platform and from what lies in the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.classic.ensemble.plan import is_ensemble
from penstock.classic.model_config import ModelConfig, ModelInstanceGroup
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.repository.config_fields import SELF_PLACED_BACKENDS
from penstock.gateway.models.repository.layout import available_versions, backend_of_name


@dataclass(frozen=True, slots=True)
class _Framework:
    """How a backend is known by its platform and by its model's file."""

    backend: str
    platforms: tuple[str, ...]
    filenames: tuple[str, ...]
    """The first one is the default."""
    other_filenames: tuple[str, ...] = ()
    """Files of other backends that it reads, too, where the configuration names it."""
    fills_platform: bool = False
    may_be_folder: bool = False


_FRAMEWORKS = (
    _Framework(
        "tensorflow", ("tensorflow_savedmodel",), ("model.savedmodel",), fills_platform=True, may_be_folder=True
    ),
    _Framework("tensorflow", ("tensorflow_graphdef",), ("model.graphdef",), fills_platform=True),
    _Framework("tensorrt", ("tensorrt_plan",), ("model.plan",), fills_platform=True),
    _Framework("onnxruntime", ("onnxruntime_onnx",), ("model.onnx",), fills_platform=True, may_be_folder=True),
    _Framework(
        "openvino",
        (),
        ("model.xml", "model.pdmodel"),
        other_filenames=("model.onnx", "model.savedmodel", "model.graphdef", "model.pb", "model.tflite"),
    ),
    _Framework("pytorch", ("pytorch_libtorch",), ("model.pt", "model.pt2"), fills_platform=True),
    _Framework("python", (), ("model.py",)),
)
"""In the order in which Triton looks for their files."""

_CPU_ONLY = frozenset({"python", "openvino", "identity", "fil", "tensorflow"})
"""Backends that run on the CPU unless told otherwise."""
_TWO_ON_CPU = frozenset({"onnxruntime"})
"""Backends of which Triton runs two instances on a CPU."""


def complete(config: ModelConfig, name: str, folder: Path, *, gpus: int = 0) -> None:
    """Fills in, in place, what was left out. Call it again after a backend's `auto_complete`: it never overwrites.

    `gpus` is the number of GPUs that the server may use.

    Raises InvalidRequestError, with Triton's text, when nothing tells the backend.
    """
    config.name = config.name or name
    if not is_ensemble(config):
        complete_backend(config, folder)
        complete_instances(config, gpus)
        _complete_optimization(config)
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    batching = config.dynamic_batching
    if config.HasField("dynamic_batching") and not batching.preferred_batch_size and config.max_batch_size > 0:
        batching.preferred_batch_size.append(config.max_batch_size)
    if config.HasField("sequence_batching"):
        _complete_sequences(config)


def _complete_sequences(config: ModelConfig) -> None:
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or 1_000_000
    if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and config.max_batch_size > 0:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def complete_backend(config: ModelConfig, folder: Path) -> None:
    """Backend, platform and the model file's name, each from the others or from the first version's files."""
    if not config.backend:
        match = _by_settings(config)
        if match is None and not config.platform and not config.default_model_filename:
            match = _by_files(folder)
        if match is not None:
            config.backend = match.backend
        elif not config.platform and not config.default_model_filename:
            _take_backend_of_name(config)
    if framework := _framework(config, folder):
        if framework.fills_platform:
            config.platform = config.platform or framework.platforms[0]
        config.default_model_filename = config.default_model_filename or _filename(framework, folder)


def _framework(config: ModelConfig, folder: Path) -> _Framework | None:
    """That of the backend. If the backend has several formats: by the configuration, or by the file that is there."""
    known = [framework for framework in _FRAMEWORKS if framework.backend == config.backend]
    for match in (_by_settings(config), _by_files(folder)) if len(known) > 1 else ():
        if match in known:
            return match
    return known[0] if known else None


def _by_settings(config: ModelConfig) -> _Framework | None:
    for framework in _FRAMEWORKS:
        if config.platform in framework.platforms or config.default_model_filename in framework.filenames:
            return framework
    return None


def _by_files(folder: Path) -> _Framework | None:
    for version in _first_version(folder):
        for framework in _FRAMEWORKS:
            files = [folder / str(version) / name for name in framework.filenames]
            if any(file.is_file() or (framework.may_be_folder and file.is_dir()) for file in files):
                return framework
    return None


def _first_version(folder: Path) -> list[int]:
    return available_versions(folder)[:1] if folder.is_dir() else []


def _filename(framework: _Framework, folder: Path) -> str:
    """The first of its files that the first version has."""
    names = (*framework.filenames, *framework.other_filenames)
    for version in _first_version(folder):
        for name in names:
            if (folder / str(version) / name).exists():
                return name
    return framework.filenames[0]


def _take_backend_of_name(config: ModelConfig) -> None:
    backend = backend_of_name(config.name)
    if not backend:
        raise InvalidRequestError(
            f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model"
            " configuration. Expected model name of the form 'model.<backend_name>'."
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"


def complete_instances(config: ModelConfig, gpus: int) -> None:
    """Names, kinds, counts and GPUs of the instance groups; one group if there is none."""
    preferred = ModelInstanceGroup.KIND_AUTO
    if config.backend in _CPU_ONLY:
        preferred = ModelInstanceGroup.KIND_CPU
    elif config.backend in SELF_PLACED_BACKENDS:
        preferred = ModelInstanceGroup.KIND_MODEL
    if not config.instance_group:
        config.instance_group.add(name=config.name, kind=preferred)
    for number, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{number}"
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            on_gpu = gpus > 0 and all(0 <= gpu < gpus for gpu in group.gpus)
            group.kind = ModelInstanceGroup.KIND_GPU if on_gpu else ModelInstanceGroup.KIND_CPU
        if group.count < 1:
            two = group.kind == ModelInstanceGroup.KIND_CPU and config.backend in _TWO_ON_CPU
            group.count = 2 if two else 1
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(range(gpus))


def _complete_optimization(config: ModelConfig) -> None:
    optimization = config.optimization
    if not optimization.HasField("input_pinned_memory"):
        optimization.input_pinned_memory.enable = True
    if not optimization.HasField("output_pinned_memory"):
        optimization.output_pinned_memory.enable = True
