"""A model's files in the words of Ollama's API: size, digest, family, parameters and their type."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engines.errors import PenstockError
from penstock.engines.formats.gguf.files import gguf_files, read_parts
from penstock.engines.formats.model_files import read_json_if_any, weight_files
from penstock.engines.formats.safetensors_file import TensorHeader, read_header

_LICENSES = ("license", "licence", "copying")
_LONGEST_LICENSE = 1 << 18
_LONGEST_VALUE = 1024
"""Characters of a text in `model_info`."""
_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "vocab_size": "vocab_size",
}
"""GGUF's words for those of config.json."""
_FILE_TYPES = dict(
    zip(
        (0, 1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 25, 30, 32, 38),
        (
            *("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S"),
            *("Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "BF16", "MXFP4"),
        ),
        strict=True,
    )
)
"""GGUF's numbers of `general.file_type`."""
_PACKED = ("qweight", "weight_packed", "_blocks")
"""Ends of the names of tensors that hold several weights in a number."""
_BESIDE_WEIGHTS = (
    "scale",
    "scales",
    "scale_inv",
    "zeros",
    "zero_point",
    "g_idx",
    "absmax",
    "quant_map",
    "_shape",
    "SCB",
    "nf4",
)
"""Ends of the names of those that say how to read them."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    size: int = 0
    """Bytes of the weights."""
    digest: str = ""
    """SHA-256 of the names and sizes of the weights and of config.json, not of the weights themselves: reading those
    takes minutes. The same files have the same one everywhere."""
    modified: float | None = None
    """When the newest of the weights was written, in Unix seconds."""
    format: str = ""
    family: str = ""
    parameters: int = 0
    level: str = ""
    """The type of most weights: BF16, Q4_K_M, INT4 ..."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """As a GGUF file's metadata says it."""
    license: str = ""

    @property
    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else None,
            "parameter_size": _short(self.parameters),
            "quantization_level": self.level,
        }


def read_model_files(folder: Path) -> ModelFiles:
    """Reads headers, and no weights; of files that cannot be read nothing is known. Blocks."""
    try:
        return _read(folder)
    except OSError:
        return ModelFiles()


def _read(folder: Path) -> ModelFiles:
    """Raises OSError."""
    config: dict[str, Any] = {}
    with suppress(PenstockError):
        config = read_json_if_any(folder / "config.json")
    paths = _weights(folder)
    stats = [(path.name, path.stat()) for path in paths if path.is_file()]
    family = str(config.get("model_type") or "")
    kind, parameters, level, info = _contents(folder, paths, config, family)
    named = repr((sorted((name, stat.st_size) for name, stat in stats), sorted(map(str, config.items()))))
    return ModelFiles(
        size=sum(stat.st_size for _, stat in stats),
        digest=hashlib.sha256(named.encode()).hexdigest(),
        modified=max((stat.st_mtime for _, stat in stats), default=None),
        format=kind,
        family=str(info.get("general.architecture", family)),
        parameters=parameters,
        level=level,
        info=info,
        license=_license(folder),
    )


def _weights(folder: Path) -> list[Path]:
    """Of a folder in a format of which no more is known: all its files."""
    files = gguf_files(folder)
    if not files:
        with suppress(PenstockError, OSError):
            files = weight_files(folder)
    return files or sorted(path for path in folder.iterdir() if path.is_file())


def _contents(
    folder: Path, paths: list[Path], config: Mapping[str, Any], family: str
) -> tuple[str, int, str, dict[str, Any]]:
    """(format, number of parameters, their type, model_info)"""
    suffix = paths[0].suffix if paths else ""
    with suppress(PenstockError):
        if suffix == ".gguf":
            return "gguf", *_of_gguf(paths)
        if suffix == ".safetensors":
            return "safetensors", *_of_safetensors(paths, config, family)
    return suffix.removeprefix("."), 0, "", _info_of(config, family, 0)


def _of_gguf(paths: list[Path]) -> tuple[int, str, dict[str, Any]]:
    metadata, tensors, _ = read_parts(paths)
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    bytes_of: Counter[str] = Counter()
    for tensor in tensors.values():
        bytes_of[tensor.dtype] += tensor.rows.nbytes
    level = _FILE_TYPES.get(metadata.get("general.file_type", -1)) or bytes_of.most_common(1)[0][0]
    info = {
        name: value
        for name, value in metadata.items()
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _LONGEST_VALUE)
    }
    return parameters, level, {"general.parameter_count": parameters, **info}


def _of_safetensors(paths: list[Path], config: Mapping[str, Any], family: str) -> tuple[int, str, dict[str, Any]]:
    from penstock.engines.formats.quantized.schemes import parse_scheme  # servers start without it

    tensors: dict[str, TensorHeader] = {}
    for path in paths:
        tensors |= read_header(path)
    bytes_of: Counter[str] = Counter()
    for tensor in tensors.values():
        bytes_of[tensor.dtype] += tensor.num_bytes
    level = bytes_of.most_common(1)[0][0] if tensors else ""
    scheme = parse_scheme(config)
    if scheme is None:
        parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    else:
        parameters = sum(_weights_in(name, tensor, scheme.bits) for name, tensor in tensors.items())
        is_float8 = scheme.bits == 8 and any(tensor.dtype.startswith("F8") for tensor in tensors.values())
        level = "FP8" if is_float8 else _level(scheme.name, scheme.bits, config)
    return parameters, level, _info_of(config, family, parameters)


def _level(scheme: str, bits: int, config: Mapping[str, Any]) -> str:
    if scheme == "bitsandbytes" and bits == 4:
        return str(config["quantization_config"].get("bnb_4bit_quant_type", "fp4")).upper()[:16]
    return "MXFP4" if scheme == "mxfp4" else f"INT{bits}"


def _weights_in(name: str, tensor: TensorHeader, bits: int) -> int:
    """How many parameters a tensor of a quantized checkpoint holds."""
    if name.endswith(_BESIDE_WEIGHTS):
        return 0
    packed = name.endswith(_PACKED) or (tensor.dtype == "U8" and bits < 8)
    return tensor.num_bytes * 8 // bits if packed else math.prod(tensor.shape)


def _info_of(config: Mapping[str, Any], family: str, parameters: int) -> dict[str, Any]:
    inner = config.get("text_config")
    settings = {**config, **inner} if isinstance(inner, dict) else config
    info: dict[str, Any] = {"general.architecture": family} if family else {}
    if parameters:
        info["general.parameter_count"] = parameters
    for name, word in _CONFIG_KEYS.items():
        if isinstance(settings.get(name), int | float) and family:
            info[f"{family}.{word}"] = settings[name]
    return info


def _license(folder: Path) -> str:
    files = (path for path in sorted(folder.iterdir()) if path.name.lower().startswith(_LICENSES))
    first = next((path for path in files if path.is_file() and path.stat().st_size <= _LONGEST_LICENSE), None)
    return "" if first is None else first.read_text(encoding="utf-8", errors="replace")


def _short(parameters: int) -> str:
    """7.2M, 1.5B"""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.1f}{name}"
    return str(parameters) if parameters else ""
