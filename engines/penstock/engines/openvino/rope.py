"""Rotary position embedding: inverse frequencies and the factor on cos and sin, from either style of config.

Types: default, linear, llama3 (Llama 3.1's smoothed bands), yarn (arXiv:2309.00071), longrope (arXiv:2402.13753),
proportional (Gemma 4: the first pairs turn, as in a whole head) and divided (by a number for each frequency, as GGUF
files have it). What depends on the length of the sequence cannot be,
since cached keys would have to be rotated again: dynamic is refused, and longrope has the frequencies of the longest
context that is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.errors import UnsupportedError

Frequencies = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Rope:
    """Position p turns pair i of a head by p * inv_freq[i]."""

    inv_freq: Frequencies
    """[head_dim / 2], or less: then the last values of a head stay as they are."""
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    axes: tuple[int, ...] = ()
    """Where tokens of images have three positions (time, row, column): the one that turns each pair; (): there is only
    one."""


def parse_rope(config: Mapping[str, Any], head_dim: int, *, may_be_partial: bool = False) -> Rope:
    """`config` is config.json, with `max_model_len` as the longest context that is served, where one was chosen.
    `may_be_partial`: the family may rotate a part of each head. Raises UnsupportedError for a type that is not offered.
    """
    settings = settings_in(config, "rope_parameters") or settings_in(config, "rope_scaling")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedError("rope_parameters for each layer type are not supported")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in _KINDS:
        raise UnsupportedError(f"RoPE type {kind!r} is not supported; supported are {', '.join(_KINDS)}")
    if settings.get("llama_4_scaling_beta"):
        raise UnsupportedError("llama_4_scaling_beta is not supported: queries that grow with their position")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    known = isinstance(partial, int | float) and 0 < partial <= 1  # larger ones: memory for angles that no head has
    whole = kind == _PROPORTIONAL
    if not known or (partial != 1 and not may_be_partial and not whole):
        raise UnsupportedError(f"partial_rotary_factor={str(partial)[:50]} is not supported")
    outside = ("max_position_embeddings", "original_max_position_embeddings", "max_model_len")
    known_settings = {key: config[key] for key in outside if key in config} | {**settings}
    try:
        theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            rope = _KINDS[kind](
                known_settings, _base_frequencies(theta, head_dim if whole else int(head_dim * partial)), theta
            )
        return replace(rope, axes=_axes(settings, config, len(rope.inv_freq)))
    except KeyError as e:
        raise UnsupportedError(f"RoPE type {kind!r} needs {e.args[0]!r} in config.json") from None
    except (TypeError, ValueError, ArithmeticError) as e:
        raise UnsupportedError(f"config.json's settings of RoPE type {kind!r} are not understood: {e}") from None


def parse_ropes_of_layer_types(
    config: Mapping[str, Any],
    head_dim: int | Mapping[str, int],
    defaults: Mapping[str, Mapping[str, Any]],
    *,
    may_be_partial: bool = False,
) -> dict[str, Rope]:
    """As `parse_rope`, for each layer type of `defaults`: what that says holds where the type's own object in
    rope_parameters does not say otherwise. `head_dim`: one, or that of each type."""
    sizes = head_dim if isinstance(head_dim, Mapping) else dict.fromkeys(defaults, head_dim)
    by_type = settings_in(config, "rope_parameters")
    unknown = set(by_type) - set(defaults)
    if unknown:
        raise UnsupportedError(
            f"rope_parameters are for each of {', '.join(defaults)}, not {', '.join(sorted(unknown))}"
        )
    own = {kind: {**settings, **settings_in(by_type, kind)} for kind, settings in defaults.items()}
    return {
        kind: parse_rope({**config, "rope_parameters": rope}, sizes[kind], may_be_partial=may_be_partial)
        for kind, rope in own.items()
    }


def settings_in(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at `key`, {} where there is none."""
    settings = config.get(key) or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedError(f"config.json has {key}={str(settings)[:50]}, which is not an object")
    return settings


def _axes(settings: Mapping[str, Any], config: Mapping[str, Any], num_pairs: int) -> tuple[int, ...]:
    """`Rope.axes`, by Qwen2-VL's sections (arXiv:2409.12191). Interleaved, as Qwen3-VL has them: time, row, column,
    time ..., as far as each has pairs; what is left is time's."""
    sections = settings.get("mrope_section") or config.get("mrope_section")
    if not isinstance(sections, list | tuple) or len(sections) != 3:
        return ()
    if not all(type(count) is int and count >= 0 for count in sections):
        return ()
    if config.get("mrope_interleaved"):
        return tuple(n % 3 if n < 3 * sections[n % 3] else 0 for n in range(num_pairs))
    if sum(sections) != num_pairs:
        return ()
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _base_frequencies(theta: float, head_dim: int) -> Frequencies:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq: Frequencies = 1.0 / np.power(np.float32(theta), exponents)
    return inv_freq


def _default(settings: Mapping[str, Any], inv_freq: Frequencies, theta: float) -> Rope:
    return Rope(inv_freq)


def _linear(settings: Mapping[str, Any], inv_freq: Frequencies, theta: float) -> Rope:
    return Rope(inv_freq / np.float32(settings["factor"]))


def _llama3(settings: Mapping[str, Any], inv_freq: Frequencies, theta: float) -> Rope:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = (float(settings[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    old_length = float(settings["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    smooth = np.clip((old_length / wavelength - low) / (high - low), 0.0, 1.0)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    return Rope(blended.astype(np.float32))


def _yarn(settings: Mapping[str, Any], inv_freq: Frequencies, theta: float) -> Rope:
    """Pairs that turn often over the original context keep their frequency, slow ones are interpolated."""
    old_length = float(settings.get("original_max_position_embeddings") or settings["max_position_embeddings"])
    factor = settings["factor"]
    factor = float(factor) if factor is not None else settings["max_position_embeddings"] / old_length
    head_dim = 2 * len(inv_freq)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(old_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(settings.get("beta_fast") or 32), dimension(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(len(inv_freq), dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    mixed = inv_freq / factor * interpolated + inv_freq * (1 - interpolated)
    return Rope(mixed.astype(np.float32), _yarn_attention_factor(settings, factor))


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    fixed = settings.get("attention_factor")
    if fixed is not None:
        return float(fixed)
    mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_scale(factor, float(mscale)) / yarn_scale(factor, float(mscale_all_dim))
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """Of queries and keys in a context that is stretched by a factor (arXiv:2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(settings: Mapping[str, Any], inv_freq: Frequencies, theta: float) -> Rope:
    """One list of divisors for contexts up to the original length, one for longer ones."""
    original = int(settings["original_max_position_embeddings"])
    is_long = (settings.get("max_model_len") or 0) > original
    rope = _divided({"divisors": settings["long_factor" if is_long else "short_factor"]}, inv_freq, theta)
    fixed = settings.get("long_mscale" if is_long else "short_mscale")  # of Phi-3.5-MoE
    fixed = settings.get("attention_factor") if fixed is None else fixed
    if fixed is not None:
        return Rope(rope.inv_freq, float(fixed))
    factor = float(settings.get("factor") or settings["max_position_embeddings"] / original)
    return Rope(rope.inv_freq, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original)))


def _divided(settings: Mapping[str, Any], inv_freq: Frequencies, theta: float) -> Rope:
    divisors = np.asarray(settings["divisors"], np.float32)
    if divisors.shape != inv_freq.shape:
        raise ValueError(f"{len(divisors)} divisors for {len(inv_freq)} frequencies")
    return Rope(inv_freq / divisors)


_PROPORTIONAL = "proportional"


def _proportional(settings: Mapping[str, Any], inv_freq: Frequencies, theta: float) -> Rope:
    """A part of the pairs turns, of those that the whole head has."""
    angles = int(float(settings.get("partial_rotary_factor") or 1.0) * 2 * len(inv_freq) // 2)
    turning = np.where(np.arange(len(inv_freq)) < angles, inv_freq, 0.0)
    return Rope((turning / float(settings.get("factor") or 1.0)).astype(np.float32))


_KINDS: dict[str, Callable[[Mapping[str, Any], Frequencies, float], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "divided": _divided,
    _PROPORTIONAL: _proportional,
    "longrope": _longrope,
    "su": _longrope,
}
