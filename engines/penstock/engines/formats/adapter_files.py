"""LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

What an adapter does is in its tensors: PEFT saves lora_A and lora_B for each layer that it has changed. The settings
give each layer's scaling; what else they say is compared with the tensors, or refused if it would change what is
computed (PEFT's src/peft/tuners/lora/config.py; `get_pattern_key` in src/peft/utils/other.py).
"""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from penstock.engines.formats.safetensors_file import StoredTensor, read_safetensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

_MOST_CONFIG_BYTES = 16 << 20
_MOST_SHOWN = 300
"""Characters of a file's own words in a message."""
_EXPRESSION = re.compile(r"\^?(?:[\w.\-]|\\\.|\.\*|\\d\+?)+\$?")
_MOST_REPEATS = 3
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

_REFUSED = {
    "alora_invocation_tokens": "LoRA that begins in the midst of a prompt (aLoRA)",
    "arrow_config": "routing among adapters (Arrow)",
    "layer_replication": "layers that occur several times",
    "lora_bias": "biases",
    "modules_to_save": "modules that were trained whole",
    "target_parameters": "parameters that are no linear layers, such as fused experts",
    "trainable_token_indices": "embeddings of tokens",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
}
"""Settings that are refused unless they are empty, and what they stand for."""

_HARMLESS_INITS = {"gaussian", "eva", "orthogonal", "mica", "lora_ga"}
"""Values of init_lora_weights that leave the model's own weights alone; PiSSA, OLoRA, CorDA and LoftQ do not."""

Rank = Annotated[int, msgspec.Meta(ge=1)]


class Settings(msgspec.Struct):
    """What counts of adapter_config.json."""

    peft_type: str
    r: Rank
    lora_alpha: float
    target_modules: list[str] | str | None = None
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = None
    layers_to_transform: list[int] | int | None = None
    bias: str | None = None
    init_lora_weights: bool | str | None = None


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a linear layer: `scaling * (x @ a.T) @ b.T`."""

    a: StoredTensor
    """[rank, inputs]"""
    b: StoredTensor
    """[outputs, rank]"""
    scaling: float


def read_adapter(folder: Path, max_rank: int) -> dict[str, LowRank]:
    """By the path of the layer in the model: "model.layers.0.self_attn.q_proj".

    The tensors are looked into when they are used, so the files must not change until then. Raises InvalidRequestError
    for files that are missing, broken or at odds with each other, UnsupportedError for kinds of adapters that cannot
    be served. No message says where the folder is.
    """
    settings, whole = read_settings(folder)
    _check_kind(settings, whole)
    pairs = _pairs(_read_tensors(folder))
    _check_targets(settings, pairs)
    ranks, alphas = _patterns("rank_pattern", settings.rank_pattern), _patterns("alpha_pattern", settings.alpha_pattern)
    layers = {}
    for path, (a, b) in pairs.items():
        rank = _matching(ranks, path, settings.r)
        alpha = _matching(alphas, path, settings.lora_alpha)
        if len(a.shape) != 2 or len(b.shape) != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
            raise InvalidRequestError(
                f"{WEIGHTS_FILE}: lora_A and lora_B of {_show(path)} have shapes {_show(a.shape)} and "
                f"{_show(b.shape)}, not [{rank}, inputs] and [outputs, {rank}], as {CONFIG_FILE} has it"
            )
        if rank > max_rank:
            raise InvalidRequestError(f"the adapter's rank of {rank} is above max_lora_rank={max_rank}")
        layers[path] = LowRank(a, b, alpha / math.sqrt(rank) if settings.use_rslora else alpha / rank)
    return layers


def read_settings(folder: Path) -> tuple[Settings, dict[str, Any]]:
    """What counts of an adapter's configuration, and all of it; whether an engine can serve the kind of LoRA that it
    describes is not looked at. Raises as `read_adapter`."""
    path = folder / CONFIG_FILE
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_CONFIG_BYTES + 1)
    except OSError as e:
        raise InvalidRequestError(f"the adapter's {CONFIG_FILE} cannot be read: {e.strerror}") from e
    if len(text) > _MOST_CONFIG_BYTES:
        raise InvalidRequestError(f"{CONFIG_FILE} has more than {_MOST_CONFIG_BYTES} bytes")
    try:
        whole = msgspec.json.decode(text.removeprefix(BOM_UTF8), type=dict[str, Any])
        kind = whole.get("peft_type")
        if kind is not None and kind != "LORA":
            raise UnsupportedError(f"{CONFIG_FILE}: adapters of type {_show(kind)} are not supported, only LORA")
        settings = msgspec.convert(whole, Settings)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidRequestError(f"{CONFIG_FILE} is no configuration of LoRA: {_show(e)}") from e
    return settings, whole


def _check_kind(settings: Settings, whole: Mapping[str, Any]) -> None:
    """Raises UnsupportedError for what is more than LoRA of linear layers."""
    for name, meaning in _REFUSED.items():
        if whole.get(name):
            raise UnsupportedError(f"{CONFIG_FILE} has {name}={_show(whole[name])}: {meaning}: not supported")
    if settings.bias not in (None, "none"):
        raise UnsupportedError(f"{CONFIG_FILE} has bias={_show(settings.bias)}: biases: not supported")
    init = settings.init_lora_weights
    if isinstance(init, str) and init.lower() not in _HARMLESS_INITS:
        raise UnsupportedError(
            f"{CONFIG_FILE} has init_lora_weights={_show(init)}: an adapter that belongs to changed weights of the "
            "model: not supported, but PEFT can save it as a plain one (path_initial_model_for_weight_conversion)"
        )


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        if (folder / _PICKLE).exists():
            raise UnsupportedError(f"the adapter has {_PICKLE}, a pickle, which is never loaded, and no {WEIGHTS_FILE}")
        raise InvalidRequestError(f"the adapter has no {WEIGHTS_FILE}")
    try:
        return read_safetensors(path)[0]
    except UnsupportedError as e:
        raise UnsupportedError(_show(e.message)) from e
    except EngineError as e:
        raise InvalidRequestError(_show(e.message)) from e


def _pairs(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """(A, B) by the path of the layer."""
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in sorted(tensors.items()):
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnsupportedError(
                f"{WEIGHTS_FILE} has the tensor {_show(name)}: only lora_A and lora_B of linear layers are supported"
            )
        sides.setdefault(match[1], {})[match[2]] = tensor
    if not sides:
        raise InvalidRequestError(f"{WEIGHTS_FILE} has no tensors")
    for path, pair in sides.items():
        if len(pair) != 2:
            raise InvalidRequestError(f"{WEIGHTS_FILE} has only lora_{next(iter(pair))} of {_show(path)}")
    return {path: (pair["A"], pair["B"]) for path, pair in sides.items()}


def _check_targets(settings: Settings, paths: Iterable[str]) -> None:
    """Raises InvalidRequestError for tensors of layers that the settings do not name.

    A regular expression in target_modules is not evaluated: with it PEFT has found the layers that the tensors are of.
    """
    targets, layers = settings.target_modules, settings.layers_to_transform
    allowed = {layers} if isinstance(layers, int) else None if layers is None else set(layers)
    for path in paths:
        named = not isinstance(targets, list) or any(f".{path}".endswith(f".{target}") for target in targets)
        number = re.search(r"\.(\d{1,9})\.", path)
        if not named or (allowed is not None and (number is None or int(number[1]) not in allowed)):
            which = "layers_to_transform" if named else "target_modules"
            raise InvalidRequestError(f"{WEIGHTS_FILE} has tensors of {_show(path)}, which {which} does not name")


def _patterns(name: str, values: Mapping[str, Any] | None) -> list[tuple[re.Pattern[str], Any]]:
    """PEFT's rule: a key, which may be a regular expression, matches the end of a path from a dot on.

    Raises UnsupportedError for expressions beyond `_EXPRESSION`: they could take for ever on a path.
    """
    for key in values or {}:
        if _EXPRESSION.fullmatch(key) is None or key.count("*") + key.count("+") > _MOST_REPEATS:
            raise UnsupportedError(
                f"{CONFIG_FILE}: {name} has {_show(key)}: supported are names, with up to {_MOST_REPEATS} of .* or \\d+"
            )
    return [(re.compile(rf"(?:.*\.)?(?:{key})$"), value) for key, value in (values or {}).items()]


def _matching(patterns: Iterable[tuple[re.Pattern[str], Any]], path: str, default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(path)), default)


def _show(value: object) -> str:
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."
