"""`options` of a request, as fields of a chat or text completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.dataplane import GenerateRequest
from penstock.gateway.ollama.schemas import Number, Options

_OTHER_SAMPLER = "this server's sampler does not have it."
_OPERATOR = "how the machine is used is the operator's to say."
_HINTS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "mirostat": ((0,), _OTHER_SAMPLER),
    "penalize_newline": ((True,), _OTHER_SAMPLER),
    "tfs_z": ((1,), _OTHER_SAMPLER),
    "typical_p": ((1,), _OTHER_SAMPLER),
    **dict.fromkeys(
        (
            *("num_batch", "num_gpu", "num_thread", "main_gpu", "numa", "low_vram", "f16_kv"),
            *("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only"),
        ),
        ((), _OPERATOR),
    ),
}
"""What is noted as ignored: the values that ask for nothing, and why."""
_INT32_MAX = 2**31 - 1
_OWN_BOUNDS = {"temperature": (0.0, 1000.0), "presence_penalty": (-100.0, 100.0), "frequency_penalty": (-100.0, 100.0)}
"""What the sampler computes without loss. OpenAI's bounds are narrower, and Ollama has none."""
_OPENAI_BOUNDS = {"temperature": (0.0, 2.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0)}


def whole(number: Number | None) -> int | None:
    """Without what is behind the point, as Ollama reads it."""
    return None if number is None else int(number)


def sampling_fields(options: Options, context: RequestContext) -> dict[str, Any]:
    """By OpenAI's names, values out of range at the end of the range, as in Ollama. What is not followed is noted."""
    _note_hints(options, context)
    most = whole(options.num_predict)
    fields = {
        "max_tokens": None if most is None or most < 0 else max(most, 1),
        "temperature": None if options.temperature is None else max(options.temperature, 0.0),
        "top_k": None if options.top_k is None else min(max(int(options.top_k), 0), _INT32_MAX),
        "top_p": _share(options.top_p),
        "min_p": _share(options.min_p),
        "seed": whole(options.seed),
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
    if options.repeat_last_n == 0:  # no token is looked at: also those penalties are off that the model's files set
        fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return fields


def within_openai(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same with values that OpenAI's API allows; `widened` brings back the others."""
    return {**fields, **{name: _clamped(fields[name], *bounds) for name, bounds in _OPENAI_BOUNDS.items()}}


def widened(wanted: GenerateRequest, fields: Mapping[str, Any], context: RequestContext) -> GenerateRequest:
    """With those of `fields` that are outside OpenAI's bounds. What is outside the sampler's own is cut and noted."""
    changed = {}
    for name, (low, high) in _OPENAI_BOUNDS.items():
        value = fields[name]
        if value is None or low <= value <= high:
            continue
        changed[name] = _clamped(value, *_OWN_BOUNDS[name])
        if changed[name] != value:
            context.ignore(f"options.{name}", "it is further from 0 than the sampler computes.")
    return replace(wanted, params=msgspec.structs.replace(wanted.params, **changed)) if changed else wanted


def _note_hints(options: Options, context: RequestContext) -> None:
    for name, (neutral, reason) in _HINTS.items():
        value = getattr(options, name)
        if value is not None and value not in neutral:
            context.ignore(f"options.{name}", reason)
    penalties = (options.repeat_penalty, options.presence_penalty, options.frequency_penalty)
    if options.repeat_last_n not in (None, -1, 0) and any(value is not None for value in penalties):
        context.ignore("options.repeat_last_n", "penalties count all tokens.")


def _share(value: float | None) -> float | None:
    return _clamped(value, 0.0, 1.0)


def _clamped(value: float | None, low: float, high: float) -> float | None:
    return None if value is None else min(max(value, low), high)
