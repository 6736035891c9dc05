"""Chats and text completions of OpenAI's API as GenerateRequests. All checks that need no engine are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TypedDict, Unpack

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.openai.schemas import ChatRequest, CommonRequest, CompletionRequest, ServiceTier
from penstock.gateway.generating.request_reading import fair_tenant, texts_or_ids
from penstock.gateway.models.language.dataplane import GenerateRequest, ServedModel
from penstock.gateway.models.language.prompts import truncation
from penstock.gateway.models.language.sampling import bad_words, bounded, priority_level, sampling_params, stop_strings
from penstock.gateway.models.language.structured_output import grammar_field
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.settings import AppSettings

_MAX_PAIRS = 16
_MAX_KEY, _MAX_VALUE = 64, 512


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """OpenAI's bounds. Raises InvalidRequestError."""
    pairs = metadata or {}
    if len(pairs) > _MAX_PAIRS:
        raise InvalidRequestError(f"metadata: at most {_MAX_PAIRS} pairs are allowed.", param="metadata")
    if any(len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in pairs.items()):
        message = f"metadata: keys may have {_MAX_KEY} characters, values {_MAX_VALUE}."
        raise InvalidRequestError(message, param="metadata")


def kept_metadata(metadata: object, context: RequestContext) -> dict[str, str]:
    """What of it is texts within OpenAI's bounds."""
    if not metadata:
        return {}
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    kept = dict([pair for pair in pairs if all(map(isinstance, pair, (str, str)))][:_MAX_PAIRS])
    kept = {key: value for key, value in kept.items() if len(key) <= _MAX_KEY and len(value) <= _MAX_VALUE}
    if kept != metadata:
        context.ignore("metadata", f"up to {_MAX_PAIRS} texts of {_MAX_VALUE} characters are kept.")
    return kept


def with_metadata(body: bytes, metadata: Mapping[str, str]) -> bytes:
    """A JSON object with this as one more field."""
    return body[:-1] + b',"metadata":' + msgspec.json.encode(metadata) + b"}"


_LEVELS = {"flex": 1, "priority": -1, "fast": -1}
"""Lower runs earlier. The other tiers are level 0."""


_KNOWN = ("auto", "default", "scale", *_LEVELS)


def note_tier(tier: ServiceTier | None, context: RequestContext) -> None:
    """One that this server does not know is the default."""
    if tier is not None and tier not in _KNOWN:
        context.ignore("service_tier", f"it must be one of {', '.join(_KNOWN)}.")


def tier_priority(tier: ServiceTier | None, policy: str) -> int:
    """Of requests that name no `priority` themselves. Under other policies all tiers are alike."""
    return _LEVELS.get(tier or "", 0) if policy == "priority" else 0


def real_tier(tier: ServiceTier | None, text_request: GenerateRequest) -> str:
    """How the request is really served, in OpenAI's words: a key may keep its requests from running early."""
    requested, level = _LEVELS.get(tier or "", 0), text_request.level
    if requested < 0 and level < 0:
        return "priority"
    return "flex" if requested > 0 and level > 0 else "default"


MAX_N = 128
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
WHAT_FITS = -1
"""A `max_tokens` by which llama.cpp's clients and LangChain ask for all that the context leaves."""
_MAX_TOKENS = 2**31 - 1
_MAX_CACHE_SALT = 128
_MAX_SESSION = 128
"""Characters by which sessions are told apart."""
_SHORT_RETENTION = 5 * 60
"""Seconds for which OpenAI keeps a prompt in memory at least."""
_LONG_RETENTION = 24 * 60 * 60
_RETENTIONS = (None, "in_memory", "in-memory", "24h")
_COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""


def chat_generate_request(
    request: ChatRequest, model: ServedModel, settings: AppSettings, context: RequestContext
) -> GenerateRequest:
    """What a chat asks for, still without its prompt: rendering the template may cost much, so all that can be refused
    is refused before it."""
    if not model.has_chat_template:
        raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="model")
    check_metadata(request.metadata)
    note_tier(request.service_tier, context)
    tier = tier_priority(request.service_tier, settings.policy) if request.priority is None else None
    return _generate_request(
        request,
        [[]],
        model,
        settings,
        context,
        max_tokens=_max_tokens(request.max_completion_tokens, request.max_tokens),
        logprobs=_chat_logprobs(request),
        prompt_logprobs=_prompt_logprobs(request),
        add_special_tokens=False,
        prediction=_prediction(request, model, context),
        tenant=fair_tenant(context, request.safety_identifier or request.user, settings.policy),
        cache_retention=_cache_retention(request, context),
        session=(request.prompt_cache_key or request.safety_identifier or request.user or "")[:_MAX_SESSION],
        priority=_priority(request.priority, settings.policy, context) if tier is None else tier,
    )


def completion_generate_request(
    request: CompletionRequest, model: ServedModel, settings: AppSettings, context: RequestContext
) -> GenerateRequest:
    """What a text completion asks for. `max_tokens` 0, which echo allows, becomes 1, since engines generate at least
    one token; the front drops that. -1 asks for all that the context leaves."""
    _check_thinking(request, model, context)
    logprobs = request.logprobs
    if logprobs is not None:
        bounded(logprobs, "logprobs", 0, MAX_LOGPROBS)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = _COMPLETION_MAX_TOKENS
    if max_tokens != WHAT_FITS:
        bounded(max_tokens, "max_tokens", 0 if request.echo else 1, _MAX_TOKENS)
    prompts = texts_or_ids(request.prompt, model.info.vocab_size, MAX_PROMPTS, "prompt")
    text_request = _generate_request(
        request,
        prompts,
        model,
        settings,
        context,
        max_tokens=0 if max_tokens == WHAT_FITS else max(max_tokens, 1),
        logprobs=logprobs,
        prompt_logprobs=_most(_prompt_logprobs(request), logprobs if request.echo else None),
        add_special_tokens=request.add_special_tokens is not False,
        priority=_priority(request.priority, settings.policy, context),
        tenant=fair_tenant(context, request.user, settings.policy),
        session=(request.user or "")[:_MAX_SESSION],
    )
    return replace(text_request, suffix=_suffix(request, model)) if request.suffix else text_request


def _check_thinking(request: CompletionRequest, model: ServedModel, context: RequestContext) -> None:
    """A text completion knows nothing of thoughts: hints about them are ignored, and a bound that nothing would keep is
    refused where the model may think. Raises UnsupportedError."""
    for name in ("prediction", "reasoning_effort"):
        if getattr(request, name) is not None:
            context.ignore(name, "text completions have no such field.")
    for name in ("thinking_token_budget", "max_reasoning_tokens"):
        if getattr(request, name) is not None and model.parsers.reasoning is not None:
            raise UnsupportedError(f"{name}: a text completion cannot end a thought; use a chat.", param=name)
        if getattr(request, name) is not None:
            context.ignore(name, "this model's chat template shows no reasoning.")


def _suffix(request: CompletionRequest, model: ServedModel) -> str | None:
    """One that is not empty: such a one asks for nothing. Raises UnsupportedError, InvalidRequestError."""
    if not model.fills_in:
        message = "suffix: this model has no tokens for filling in the text between two others."
        raise UnsupportedError(message, param="suffix")
    if request.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens: a prompt with a suffix cannot be cut."
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    return request.suffix


class _OwnFields(TypedDict, total=False):
    """Of a GenerateRequest, those that chats and text completions have each in their own way."""

    add_special_tokens: bool
    prediction: str
    tenant: str
    cache_retention: int
    session: str
    priority: int


def _generate_request(
    request: CommonRequest,
    prompts: list[str | list[int]],
    model: ServedModel,
    settings: AppSettings,
    context: RequestContext,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    **own: Unpack[_OwnFields],
) -> GenerateRequest:
    if request.spaces_between_special_tokens is False and not model.joins_special_tokens:
        message = "spaces_between_special_tokens: this model's tokenizer puts spaces between all tokens."
        raise UnsupportedError(message, param="spaces_between_special_tokens")
    n = 1 if request.n is None else bounded(request.n, "n", 1, MAX_N)
    _check_best_of(request.best_of, n)
    if n * len(prompts) > settings.max_choices:
        message = f"The number of prompts times n must not be greater than {settings.max_choices}."
        raise InvalidRequestError(message, param="n")
    note_hints(request, context)
    return GenerateRequest(
        model=request.model,
        prompts=prompts,
        params=sampling_params(
            request,
            model.info,
            model.default_params,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        n=n,
        grammar_field=grammar_field(request),
        stop=stop_strings(request.stop),
        bad_words=bad_words(request.bad_words),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        truncation=truncation(request.truncate_prompt_tokens, request.truncation_side),
        context=context,
        cache_salt=_cache_salt(request.cache_salt),
        **own,
    )


def _max_tokens(*limits: int | None) -> int:
    """The first of `max_completion_tokens` and `max_tokens` that is set. 0, all that the context leaves, if neither is,
    or if `max_tokens` is WHAT_FITS."""
    for name, value in zip(("max_completion_tokens", "max_tokens"), limits, strict=True):
        if value == WHAT_FITS and name == "max_tokens":
            return 0
        if value is not None:
            return bounded(value, name, 1, _MAX_TOKENS)
    return 0


def _check_best_of(best_of: int | None, n: int) -> None:
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise InvalidRequestError("best_of must not be less than n.", param="best_of")
    raise UnsupportedError("best_of must be equal to n: all choices are returned.", param="best_of")


def _chat_logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs
    if top is not None:
        bounded(top, "top_logprobs", 0, MAX_LOGPROBS)
        if top and not request.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return (top or 0) if request.logprobs else None


def _priority(priority: int | None, policy: str, context: RequestContext) -> int:
    if priority and policy != "priority":
        context.ignore("priority", f"this server runs the scheduling policy '{policy}'.")
        return 0
    return priority_level(priority, policy)


def _cache_retention(request: ChatRequest, context: RequestContext) -> int:
    """In seconds; 0: its prompt is evicted like all others."""
    if request.prompt_cache_retention not in _RETENTIONS:
        context.ignore("prompt_cache_retention", "it must be in_memory or 24h.")
        return _SHORT_RETENTION
    if request.prompt_cache_retention == "24h":
        return _LONG_RETENTION
    return _SHORT_RETENTION if request.prompt_cache_retention or request.prompt_cache_key else 0


def _prediction(request: ChatRequest, model: ServedModel, context: RequestContext) -> str:
    if request.prediction is None:
        return ""
    if not model.info.supports_drafts:
        context.ignore("prediction", "this model's engine cannot verify predictions.")
        return ""
    return request.prediction.text


def _prompt_logprobs(request: CommonRequest) -> int | None:
    count = request.prompt_logprobs
    if count is None:
        return None
    bounded(count, "prompt_logprobs", 0, MAX_LOGPROBS)
    if request.stream:
        raise InvalidRequestError("prompt_logprobs are not available in streams.", param="prompt_logprobs")
    return count


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not 1 <= len(salt) <= _MAX_CACHE_SALT or any(char in "@/\\\0" for char in salt):
        message = f"cache_salt must have 1 to {_MAX_CACHE_SALT} characters, none of them @, /, \\ or NUL."
        raise InvalidRequestError(message, param="cache_salt")
    return salt


_HINTS: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "guided_decoding_backend": (None,),
    "length_penalty": (None, 1),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "moderation": (None,),
    "stream_interval": (None, 1),
    "web_search_options": (None,),
}
_hints_of = attrgetter(*_HINTS)
_SILENT = (None,) * len(_HINTS)
"""Most requests: that is seen at once."""


def note_hints(request: CommonRequest, context: RequestContext) -> None:
    """Of those that are the same for every model. What a chat's `audio` would change, its `modalities` say."""
    if _hints_of(request) != _SILENT:
        for name, neutral in _HINTS.items():
            if getattr(request, name) not in neutral:
                context.ignore(name, "this server does nothing by it.")
    if request.stream_options is not None:
        if not request.stream:
            context.ignore("stream_options", "the answer is no stream.")
        elif request.stream_options.include_obfuscation:
            context.ignore("stream_options.include_obfuscation", "this server pads no chunks.")
