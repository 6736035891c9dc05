"""The longest context that config.json allows, for all engines and for what is known before one is started.

Some models were stretched: their positions are turned by less than in training, and the context is as many times longer
(RoPE types linear and yarn). Some makers have max_position_embeddings say what the model was trained with, as
transformers' documentation has it, others say the longer one there (DeepSeek, gpt-oss). With
original_max_position_embeddings these can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.engines.errors import UnsupportedError

_LONGEST = 1 << 26
"""Several times that of any known model."""
_STRETCHING = ("linear", "yarn")
_LONGROPE = ("longrope", "su")
"""The second is the name of older checkpoints."""
_STRETCHED_ALREADY = "gemma3"
"""Has linear, and neither of the two lengths is that of the training."""


def context_length(config: Mapping[str, Any], chosen: int | None = None) -> int | None:
    """In tokens; `config` is config.json, or the language model's part of it, with its defaults. None: it says nothing.
    With longrope, the context of the short frequencies unless more was `chosen`. Raises UnsupportedError for settings
    that are not understood."""
    longest = config.get("max_position_embeddings")
    if type(longest) is not int:
        return None
    for settings in rope_settings(config):
        kind = settings.get("rope_type") or settings.get("type")
        if kind in _LONGROPE:
            original = _original(config, settings)
            if original is None:
                raise UnsupportedError("RoPE type 'longrope' needs 'original_max_position_embeddings' in config.json")
            longest = longest if (chosen or 0) > original else min(longest, original)
        elif kind in _STRETCHING and not _is_stretched(config):
            longest = max(longest, _stretched(config, settings, longest))
    return longest


def rope_settings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Of all layers, or of each type of layers."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(found, Mapping):
        nested = [value for value in found.values() if isinstance(value, Mapping)]
        yield from nested or [found]


def _is_stretched(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    named = [*(names if isinstance(names, list) else []), config.get("model_type")]
    return any(str(name).lower().startswith(_STRETCHED_ALREADY) for name in named)


def _stretched(config: Mapping[str, Any], settings: Mapping[str, Any], longest: int) -> int:
    factor = settings.get("factor")
    if factor is None:  # the ratio of the two lengths, in yarn
        return longest
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < _LONGEST:
        raise UnsupportedError(f"config.json has a RoPE factor of {str(factor)[:50]}, which is no such factor")
    length = int(factor * (_original(config, settings) or longest))
    if length > _LONGEST:
        raise UnsupportedError(f"config.json's RoPE settings make a context of {length} tokens, more than {_LONGEST}")
    return length


def _original(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    key = "original_max_position_embeddings"
    found = settings.get(key) or config.get(key)
    if found is not None and (type(found) is not int or not 0 < found <= _LONGEST):
        raise UnsupportedError(f"config.json has {key}={str(found)[:50]}, which is no number of tokens")
    return found
