"""Loading: from a folder to a transformers model whose attention is ours.

Only config.json and safetensors are read, and nothing that runs code: transformers is told not to trust remote code,
and what could ask it to run some is refused here, before it sees the folder (CVE-2026-4372:
`_attn_implementation_internal` in config.json fetched kernels from a hub).
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from penstock.engines.contract.loading import Loading, Report
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.model_files import INDEX, SINGLE, read_json, real_path, weight_files
from penstock.engines.formats.model_settings import context_length, rope_settings
from penstock.engines.formats.safetensors_file import read_header
from penstock.engines.torch.attention import ATTENTION, register
from penstock.engines.torch.recurrent import OLDEST, RECURRENT

_REFUSED = {
    "auto_map": "a model's own code is never run; without this key transformers' own class of that model is used",
    "quantization_config": "quantized checkpoints are not supported",
}


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json, and the names of the weight files, looked over. Raises UnsupportedError, naming what is refused."""
    settings = read_json(model_dir / "config.json")
    for key, meaning in _REFUSED.items():
        if settings.get(key) is not None:
            raise UnsupportedError(f"config.json has {key}: {meaning}")
    for key, value in _entries(settings):
        if key == "auto_map":
            raise UnsupportedError(f"config.json has {key}: {_REFUSED['auto_map']}")
        # Of attention, and of experts: a name with a slash is a repository to fetch code from.
        if "_implementation" in key and "/" in str(value):
            raise UnsupportedError(f"config.json has {key}={value!r}: kernels are not fetched from elsewhere")
    if (model_dir / "adapter_config.json").exists():
        raise UnsupportedError(
            f"{model_dir} has adapter_config.json: adapters are loaded beside a model (--lora NAME=FOLDER), not as one"
        )
    weight_files(model_dir)  # transformers would unpickle a shard of another kind, and follow a path out of the folder
    return settings


def _entries(settings: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, however deep."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield str(key), value
            yield from _entries(value)
    elif isinstance(settings, list):
        for value in settings:
            yield from _entries(value)


_STAGE = "weights"


@contextmanager
def weights_reported(report: Report) -> Iterator[None]:
    """While transformers loads a model. Where a version has no hook for its bars, only the stage is reported."""
    report(Loading(_STAGE))
    set_hook = getattr(logging, "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        bar = factory(*args, **options)
        counts_weights = args and hasattr(args[0], "__len__") and _STAGE in str(options.get("desc"))
        return _CountedBar(bar, len(args[0]), report) if counts_weights else bar

    before = set_hook(hook)
    try:
        yield
    finally:
        set_hook(before)


class _CountedBar:
    """A bar that reports each item that is done; all else is the bar's own."""

    def __init__(self, bar: Any, total: int, report: Report) -> None:
        self._bar = bar
        self._total = total
        self._report = report

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._bar, 1):
            yield item
            self._report(Loading(_STAGE, number, self._total, "tensors"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


_KNOWN_LAYERS = {"full_attention", "sliding_attention", "mlp", "moe", *RECURRENT}
_SETTINGS = ("config.json", "generation_config.json")
_OLDEST = (5, 3)
"""Of transformers: before it a checkpoint could have code fetched and run (CVE-2026-4372)."""


def load_config(model_dir: Path) -> PretrainedConfig:
    """config.json as transformers reads it. Raises UnsupportedError for kinds of models that cannot be driven."""
    _check_release(_OLDEST)
    try:
        with _as_transformers_reads_it(model_dir) as folder:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise UnsupportedError(f"transformers {transformers.__version__} does not take this config.json: {e}") from e
    config = _text_config(config)
    if config.is_encoder_decoder:
        raise UnsupportedError(f"{config.model_type} is an encoder-decoder model; decoders only are supported")
    kinds = layer_types(config)
    unknown = kinds - _KNOWN_LAYERS
    if unknown:
        raise UnsupportedError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}; supported are "
            f"{', '.join(sorted(_KNOWN_LAYERS))}"
        )
    if kinds & RECURRENT:
        _check_release(OLDEST, "for recurrent layers ")
    return config


def _text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Of a multimodal model its language model's, where transformers has a class for that alone; it leaves the other
    weights out. Raises UnsupportedError."""
    text = getattr(config, "text_config", None)
    if text is None:
        return config
    classes = [MODEL_FOR_CAUSAL_LM_MAPPING.get(type(part), None) for part in (config, text)]
    if classes[0] is not None and classes[0] is classes[1]:
        return text  # type: ignore[no-any-return]
    raise UnsupportedError("config.json has text_config: multimodal models are not supported")


def layer_types(config: PretrainedConfig) -> set[str]:
    """Empty where config.json does not name them."""
    return set(getattr(config, "layer_types", None) or ())


def _check_release(oldest: tuple[int, int], purpose: str = "") -> None:
    if tuple(int(n) for n in transformers.__version__.split(".")[:2]) < oldest:
        raise UnsupportedError(
            f"transformers {transformers.__version__} is too old: {purpose}at least {oldest[0]}.{oldest[1]} is needed"
        )


def load_model(
    model_dir: Path, model_config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Raises UnsupportedError for an architecture that is no causal LM, EngineError for a checkpoint that is broken."""
    register()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: PreTrainedModel
    info: dict[str, Any]
    try:
        with _as_transformers_reads_it(model_dir) as folder:
            model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder,
                config=model_config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except (ValueError, KeyError, TypeError, NotImplementedError, ImportError) as e:
        if e.args == (ATTENTION,):  # models from before attention functions look their classes up by that name
            raise UnsupportedError(f"{model_config.model_type} does not let its attention be replaced") from e
        raise UnsupportedError(f"transformers does not load this {model_config.model_type} as a causal LM: {e}") from e
    except Exception as e:  # safetensors and torch have errors of their own for what is damaged
        raise EngineError(f"the checkpoint in {model_dir} cannot be loaded: {e}") from e
    _check_tensors(info)
    if getattr(model, "_is_stateful", False) and not layer_types(model_config) & RECURRENT:
        raise UnsupportedError(f"{type(model).__name__} keeps state outside the KV cache, which is not supported")
    nn.Module.to(model, device)
    return model


@contextmanager
def _as_transformers_reads_it(model_dir: Path) -> Iterator[Path]:
    """The folder; or, where the names of its weights or the byte-order marks of its settings are in the way, one with
    links to these weights by other names, and these settings without the marks."""
    settings = {name: (model_dir / name).read_bytes() for name in _SETTINGS if (model_dir / name).is_file()}
    has_usual_names = (model_dir / SINGLE).is_file() or (model_dir / INDEX).is_file()
    if has_usual_names and not any(content.startswith(BOM_UTF8) for content in settings.values()):
        yield model_dir
        return
    files = weight_files(model_dir)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, content in settings.items():
            (folder / name).write_bytes(content.removeprefix(BOM_UTF8))
        for path in files:
            (folder / (path.name if len(files) > 1 else SINGLE)).symlink_to(real_path(path))
        if len(files) > 1:
            places = {name: path.name for path in files for name in read_header(path)}
            (folder / INDEX).write_text(json.dumps({"weight_map": places, "metadata": {}}))
        yield folder


def _check_tensors(info: Mapping[str, Any]) -> None:
    """transformers makes up what is missing, and leaves out what it has no use for."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise EngineError(f"the checkpoint lacks {len(missing)} tensors: {missing[0]} ...")
    ignored = [name for name in sorted(info["unexpected_keys"]) if not name.endswith("rotary_emb.inv_freq")]
    if ignored:
        raise UnsupportedError(
            f"the checkpoint has {len(ignored)} tensors that no part of the model uses: {ignored[0]} ..."
        )


def longest_context(model_config: PretrainedConfig, chosen: int | None) -> int | None:
    """`context_length`, whatever the family calls its sizes."""
    longest = getattr(model_config, "max_position_embeddings", None)
    return context_length({**model_config.to_dict(), "max_position_embeddings": longest}, chosen)


def check_rope(model_config: PretrainedConfig, model_len: int) -> None:
    """Rotations that depend on the longest request of a step would make a request depend on its neighbours."""
    for rope in rope_settings(model_config.to_dict()):
        kind = rope.get("rope_type", "default")
        if kind == "dynamic":
            raise UnsupportedError(
                "RoPE type 'dynamic' is not supported: it changes with the longest request of a step"
            )
        original = rope.get("original_max_position_embeddings") or getattr(
            model_config, "original_max_position_embeddings", None
        )
        if kind == "longrope" and original is not None and model_len > original:
            raise UnsupportedError(
                f"RoPE type 'longrope' changes with the longest request of a step beyond {original} tokens: "
                f"max_model_len must be set to at most that",
                param="max_model_len",
            )
