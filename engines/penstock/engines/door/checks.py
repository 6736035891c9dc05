"""What a request from a client must be like, so that it can harm no other. An engine trusts its owner; a client of a
door is a gateway, too, but not the one that started the engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import InvalidRequestError, NotFoundError, UnsupportedError

_INT32 = 1 << 31
_INT64 = 1 << 63
_MOST_SAMPLES = 1024
_MOST_CHARS = 1 << 10
"""Of a tenant, a salt, an adapter's key."""
_MOST_GRAMMAR_CHARS = 1 << 19
_MOST_LISTED = 1 << 12
"""Entries of lists that every step goes through."""
_MOST_LOGPROBS = 1 << 10


def check_request(request: AddRequest, info: ModelInfo, adapters: Collection[str]) -> None:
    """Raises InvalidRequestError, NotFoundError, UnsupportedError. `adapters`: keys that the engine knows. What the
    scheduler's intake checks of all requests is not checked here."""
    _require(len(request.ids) <= _MOST_SAMPLES, "ids")
    _require(abs(request.priority) <= _INT32, "priority")
    _require(0 <= request.cache_retention <= _INT32, "cache_retention")
    for name in ("tenant", "cache_salt", "adapter"):
        _require(len(getattr(request, name)) <= _MOST_CHARS, name)
    if request.adapter and request.adapter not in adapters:
        raise NotFoundError("The engine does not have the request's LoRA adapter.")
    if isinstance(request.params, SamplingParams):
        _check_sampling(request.params, info)


def _check_sampling(params: SamplingParams, info: ModelInfo) -> None:
    wanted = [count for count in (params.logprobs, params.prompt_logprobs) if count is not None]
    if wanted and not info.supports_logprobs:
        raise UnsupportedError("This model's engine does not give logprobs.", param="logprobs")
    _require(all(0 <= count <= _MOST_LOGPROBS for count in wanted), "logprobs")
    for name, low, high in _RANGES:
        _require(low <= getattr(params, name) <= high, name)
    _require(params.seed is None or -_INT64 <= params.seed < _INT64, "seed")
    _require(len(params.logit_bias) <= _MOST_LISTED, "logit_bias")
    _require(_tokens(params.logit_bias, info) and all(map(math.isfinite, params.logit_bias.values())), "logit_bias")
    _require(len(params.stop_token_ids) <= _MOST_LISTED and _tokens(params.stop_token_ids, info), "stop_token_ids")
    _require(len(params.bad_words) <= _MOST_LISTED, "bad_words")
    _require(all(row and _tokens(row, info) for row in params.bad_words), "bad_words")
    _require(_tokens(params.prediction, info), "prediction")
    allowed = params.allowed_token_ids
    _require(allowed is None or (len(allowed) > 0 and _tokens(allowed, info)), "allowed_token_ids")
    _require(len(params.processors) <= _MOST_LISTED, "processors")
    if params.grammar is not None:
        _require(len(params.grammar.text) <= _MOST_GRAMMAR_CHARS, "grammar")


_RANGES = (
    ("max_tokens", 1, _INT32),
    ("min_tokens", 0, _INT32),
    ("temperature", 0.0, 1e3),
    ("top_p", 1e-12, 1.0),
    ("top_k", 0, _INT32),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -1e3, 1e3),
    ("frequency_penalty", -1e3, 1e3),
    ("repetition_penalty", 1e-6, 1e6),
)
"""Wider than what gateways let through: these are what an engine can compute with. NaN is in none of them."""


def _tokens(ids: Iterable[int], info: ModelInfo) -> bool:
    return all(0 <= token_id < info.vocab_size for token_id in ids)


def _require(holds: bool, field: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{field} is out of bounds.", param=field)
