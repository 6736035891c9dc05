"""The texts of a request as tokens: its prompts, and those among its sampling parameters."""

from __future__ import annotations

import msgspec

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.work_pool import WorkPool
from penstock.gateway.llm.generate_request import GenerateRequest
from penstock.gateway.llm.models import LoadedModel
from penstock.gateway.llm.prompts import encode_prompts
from penstock.gateway.llm.token_limits import word_tokens

_MAX_PROMPT_LOGPROBS = 1 << 21
"""Of all choices together: text completions show those of its prompt with each choice. One takes hundreds of bytes."""


async def prompt_tokens(model: LoadedModel, request: GenerateRequest, pool: WorkPool) -> list[list[int]]:
    """The prompts, with the suffix, and cut where the request says so. Raises as `encode_prompts`, and
    InvalidRequestError for too many log probabilities."""
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    fills = None if request.suffix is None else model.tokenizer.fill_in_middle
    if request.suffix is not None:
        texts.append(request.suffix)
    cut, info = request.truncation, model.engine.info
    bare = not request.add_special_tokens or fills is not None
    encoded = iter(await encode_prompts(model, texts, pool, add_special_tokens=not bare, cut=cut is not None))
    prompts = [
        next(encoded) if isinstance(prompt, str) else _checked_ids(prompt, info.vocab_size)
        for prompt in request.prompts
    ]
    if fills is not None:
        behind = next(encoded)
        prompts = [fills.prompt(prompt, behind) for prompt in prompts]
    if cut is not None:
        prompts = [cut.applied(prompt, info.context_length, request.params.max_tokens) for prompt in prompts]
    _check_logprobs(request, prompts)
    return prompts


async def tokenized_params(model: LoadedModel, request: GenerateRequest, pool: WorkPool) -> SamplingParams:
    """The sampling parameters, with the tokens of those that are texts. Tokens that only the tokenizer has, and the
    model never writes, are left out. Raises as `encode_prompts`."""
    params, fills, info = request.params, model.tokenizer.fill_in_middle, model.engine.info
    if request.suffix is not None and fills is not None:
        params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *fills.ends))
    if request.bad_words:
        words = word_tokens(request.bad_words, model.tokenizer)
        params = msgspec.structs.replace(params, bad_words=tuple(w for w in words if max(w) < info.vocab_size))
    if request.prediction:
        [tokens] = await encode_prompts(model, [request.prediction], pool, add_special_tokens=False, cut=True)
        known = [token for token in tokens[: info.context_length] if token < info.vocab_size]
        params = msgspec.structs.replace(params, prediction=tuple(known))
    return params


def _checked_ids(prompt: list[int], vocab_size: int) -> list[int]:
    if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise InvalidRequestError(f"Token ids must be in 0..{vocab_size - 1}.", param="prompt")
    return prompt


def _check_logprobs(request: GenerateRequest, prompts: list[list[int]]) -> None:
    asked = request.params.prompt_logprobs
    if asked is None:
        return
    count = sum(map(len, prompts)) * (1 + asked) * request.n
    if count > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"The prompts' tokens have {count} log probabilities in the choices of this call, and "
            f"{_MAX_PROMPT_LOGPROBS} are allowed. Please ask for fewer, or in several calls.",
            param="prompt",
        )
