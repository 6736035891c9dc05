"""Sampling fields of requests, as SamplingParams: the ranges of OpenAI, vLLM's where OpenAI has none."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from penstock.engines.contract.messages import Grammar, ProcessorCall, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.kit.sampling.processors import processor_names
from penstock.gateway.models.language.structured_output import StructureFields, wanted_grammar
from penstock.gateway.requests.bounded_json import echoed
from penstock.tokenizers import Tokenizer

MAX_BAD_WORDS = 128
MAX_WORD_CHARS = 256
MAX_PROCESSORS = 16


class ProcessorSpec(msgspec.Struct, forbid_unknown_fields=True):
    """A logits processor with parameters, in vLLM's words."""

    qualname: str
    kwargs: dict[str, Any] = {}


def allowed_tokens(ids: Collection[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    """Raises InvalidRequestError."""
    if ids is None:
        return None
    name = "allowed_token_ids"
    if not ids:
        raise InvalidRequestError(f"{name} must not be empty.", param=name)
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequestError(f"{name}: a token id is not in the vocabulary.", param=name)
    return tuple(sorted(set(ids)))


def bad_words(words: Sequence[str] | None) -> tuple[str, ...]:
    """Still as texts. Raises InvalidRequestError."""
    if len(words or ()) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words: at most {MAX_BAD_WORDS} are allowed.", param="bad_words")
    if any(not word.strip() or len(word) > MAX_WORD_CHARS for word in words or ()):
        message = f"bad_words: each must have 1 to {MAX_WORD_CHARS} characters, not all of them white space."
        raise InvalidRequestError(message, param="bad_words")
    return tuple(words or ())


def word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, and those that it has behind a space, where they are others."""
    rows: list[list[int]] = []
    for word in words:
        alone = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        behind = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        rows.append(alone)
        if behind[-len(alone) :] != alone:
            rows.append(behind)
    return tuple(tuple(ids) for ids in rows if ids)


def logits_processors(processors: Sequence[str | ProcessorSpec] | None, info: ModelInfo) -> tuple[ProcessorCall, ...]:
    """Raises InvalidRequestError for a name that is not installed, UnsupportedError."""
    name = "logits_processors"
    specs = [ProcessorSpec(one) if isinstance(one, str) else one for one in processors or ()]
    if len(specs) > MAX_PROCESSORS:
        raise InvalidRequestError(f"{name}: at most {MAX_PROCESSORS} are allowed.", param=name)
    if specs and not info.supports_processors:
        raise UnsupportedError(f"{name}: this model's engine has none.", param=name)
    installed = processor_names() if specs else []
    for spec in specs:
        if spec.qualname not in installed:
            there = ", ".join(installed) or "none"
            raise InvalidRequestError(f"{name}: one is not installed. There are: {there}.", param=name)
    return tuple(ProcessorCall(spec.qualname, spec.kwargs) for spec in specs)


_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_NO_SEED = -1
"""What the clients of llama.cpp, Ollama and vLLM send where every answer may be another one."""
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

MAX_STOPS = 1024
MAX_STOP_BYTES = 16 << 10
"""Of all stop strings of a request together."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
_MOST_NAMED = 8
"""Wrong keys of `logit_bias` that its error names."""
_LIKELIEST_ALONE = 1e-9
"""For `top_p` 0, which OpenAI takes and samplers do not: no second token fits in."""


class SamplingFields(StructureFields, kw_only=True):
    """What a caller may say about sampling, whatever the protocol. None: silent, so the model's default holds."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logits_processors: list[str | ProcessorSpec] | None = None
    n: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


NUMBERS: Mapping[str, type] = {
    field.name: kind
    for field in msgspec.structs.fields(SamplingFields)
    for kind in (int, float)
    if field.type == kind | None
}
"""The fields that are numbers, each with its type."""


def sampling_params(
    request: SamplingFields,
    info: ModelInfo,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises InvalidRequestError for the first value out of range. `max_tokens` 0: whatever the context leaves."""
    if (logprobs is not None or prompt_logprobs is not None) and not info.supports_logprobs:
        raise UnsupportedError("This model's engine does not give logprobs.", param="logprobs")
    top_k = _integer(request, "top_k", defaults, 0, -1, _INT32_MAX)
    min_tokens = _integer(request, "min_tokens", {}, 0, 0, _INT32_MAX)
    if max_tokens and min_tokens > max_tokens:
        raise InvalidRequestError("min_tokens must not be greater than max_tokens.", param="min_tokens")
    stop_token_ids = _stop_token_ids(request.stop_token_ids or [], info.vocab_size)
    allowed = allowed_tokens(request.allowed_token_ids, info.vocab_size)
    if min_tokens and allowed is not None and set(allowed) <= {*stop_token_ids, *info.eos_token_ids}:
        message = "min_tokens: allowed_token_ids has nothing but tokens that end the output."
        raise InvalidRequestError(message, param="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_number(request, "temperature", defaults, 1.0, 0.0, 2.0),
        top_p=_number(request, "top_p", defaults, 1.0, 0.0, 1.0) or _LIKELIEST_ALONE,
        top_k=max(top_k, 0),
        min_p=_number(request, "min_p", defaults, 0.0, 0.0, 1.0),
        seed=_seed(request.seed),
        presence_penalty=_number(request, "presence_penalty", defaults, 0.0, -2.0, 2.0),
        frequency_penalty=_number(request, "frequency_penalty", defaults, 0.0, -2.0, 2.0),
        repetition_penalty=_number(request, "repetition_penalty", defaults, 1.0, 0.0, 1e6, above=True),
        logit_bias=_logit_bias(request.logit_bias or {}, info.vocab_size),
        allowed_token_ids=allowed,
        processors=logits_processors(request.logits_processors, info),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=_grammar(request, info),
    )


def _grammar(request: SamplingFields, info: ModelInfo) -> Grammar | None:
    choice = wanted_grammar(request)
    if choice is None:
        return None
    grammar, field = choice
    if not info.supports_grammars:
        raise UnsupportedError(f"{field}: this model's engine has no structured output.", param=field)
    return grammar


def stop_strings(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    """At most `MAX_STOPS`, none empty, within `MAX_STOP_BYTES` of UTF-8 together. `name` is the caller's field."""
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOPS:
        raise InvalidRequestError(f"{name}: at most {MAX_STOPS} strings are allowed.", param=name)
    if not all(strings):
        raise InvalidRequestError(f"{name}: a string must not be empty.", param=name)
    if sum(len(text.encode(errors="surrogatepass")) for text in strings) > MAX_STOP_BYTES:
        message = f"{name}: the strings are longer than {MAX_STOP_BYTES} bytes together."
        raise InvalidRequestError(message, param=name)
    return tuple(strings)


def bounded(value: int, name: str, low: int, high: int) -> int:
    """The value, or InvalidRequestError outside low..high."""
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}.", param=name)
    return value


def priority_level(priority: int | None, policy: str) -> int:
    """Lower runs earlier. Raises InvalidRequestError, and UnsupportedError where the policy knows no priorities."""
    if not priority:
        return 0
    if policy != "priority":
        message = f"priority needs the scheduling policy 'priority'; this server runs '{policy}'."
        raise UnsupportedError(message, param="priority")
    return bounded(priority, "priority", -(2**31), 2**31 - 1)


def _number(
    request: SamplingFields,
    name: str,
    defaults: Mapping[str, Any],
    fallback: float,
    low: float,
    high: float,
    *,
    above: bool = False,
) -> float:
    """`above`: the lower bound itself is not allowed."""
    value: float | None = getattr(request, name)
    if value is None:
        return float(defaults.get(name, fallback))
    if not low <= value <= high or (above and value == low):
        bound = f"greater than {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
        raise InvalidRequestError(f"{name} must be {bound}.", param=name)
    return value


def _integer(
    request: SamplingFields, name: str, defaults: Mapping[str, Any], fallback: int, low: int, high: int
) -> int:
    value: int | None = getattr(request, name)
    if value is None:
        return int(defaults.get(name, fallback))
    return bounded(value, name, low, high)


def _seed(seed: int | None) -> int | None:
    if seed == _NO_SEED:
        return None
    if seed is not None and not _INT64_MIN <= seed <= _INT64_MAX:
        raise InvalidRequestError("seed must fit in 64 bits.", param="seed")
    return seed


def _stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS} are allowed."
        raise InvalidRequestError(message, param="stop_token_ids")
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise InvalidRequestError("stop_token_ids: a token id is not in the vocabulary.", param="stop_token_ids")
    return tuple(ids)


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"logit_bias: at most {MAX_LOGIT_BIAS} are allowed.", param="logit_bias")
    if wrong := [key for key in bias if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size]:
        keys = ", ".join(map(echoed, wrong[:_MOST_NAMED])) + (" ..." if len(wrong) > _MOST_NAMED else "")
        message = f"logit_bias: not token ids of the vocabulary, which has {vocab_size} tokens: {keys}"
        raise InvalidRequestError(message, param="logit_bias")
    for key, value in bias.items():
        if not -100 <= value <= 100:
            message = f"logit_bias: values must be between -100 and 100, not {value:g} as that of {echoed(key)}."
            raise InvalidRequestError(message, param="logit_bias")
    return {int(key): value for key, value in bias.items()}
