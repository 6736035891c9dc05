"""Requests of fronts to generate, and their texts as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.engines.contract.messages import ImageInput, SamplingParams
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.language.images.reader import RequestImage
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.models.language.prompts import Truncation, encode_prompts
from penstock.gateway.models.language.sampling import word_tokens
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.intake import WorkPool
from penstock.tokenizers import StageFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What to generate. Fronts build it from their own schemas; `DataPlane.generate` validates it against the model."""

    model: str
    prompts: Sequence[str | list[int]]
    """Texts, encoded by the model's tokenizer, or token ids as they are."""
    images: tuple[ImageInput, ...] = ()
    """Of the only prompt, which has places for them."""
    unread_images: tuple[RequestImage, ...] = ()
    """The same as they were sent, of a prompt that has the model's own mark for each."""
    params: SamplingParams
    """`max_tokens` 0 means: whatever the context leaves."""
    clamps: bool = True
    """`max_tokens` is an upper bound: a prompt behind which the context leaves less gets that. False: it is refused."""
    grammar_field: str | None = None
    """What the caller calls `params.grammar`, for errors."""
    n: int = 1
    """Samples per prompt."""
    stop: tuple[str, ...] = ()
    """Looked for in each choice's text; with stages, in what they leave as text."""
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    """Texts for `params.bad_words`, which has their tokens."""
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()
    """Special tokens that are text although the others are skipped: stages look for them."""
    stages: tuple[StageFactory, ...] = ()
    """What looks for reasoning, tool calls and other parts in each choice's text, in this order. The first sees what
    the model wrote, with the special tokens in `shown_tokens`. Only fronts that have fields for such parts name stages;
    the others show the text as the model wrote it."""
    show_reasoning: bool = True
    """Whether deltas have the reasoning that stages find. It is counted in any case."""
    suffix: str | None = None
    """What stands behind the text that is to be filled in; the prompts stand before it. Only of models with tokens for
    that."""
    prediction: str = ""
    """The text for `params.prediction`, which has its tokens."""
    truncation: Truncation | None = None
    """How prompts are cut before they are judged by their length."""
    add_special_tokens: bool = True
    """For text prompts: let the tokenizer add BOS and the like. False for rendered chat templates."""
    priority: int = 0
    """What the caller asks for; `level` is what counts."""
    context: RequestContext = field(default_factory=RequestContext)
    tenant: str = ""
    """Whom a fair scheduler charges, and who alone may use these prompts' cached prefixes. The context's, if that has
    one."""
    cache_salt: str = ""
    session: str = ""
    """The caller's name for requests that belong together: where there are replicas, one serves them all while that
    costs little."""
    cache_retention: int = 0
    """Seconds for which the prompts are evicted from the prefix cache later than others; 0: no later."""
    pulse: float | None = None
    """After so many seconds with nothing to show, and again after as many, the generation yields an empty list: a front
    can tell its client that the request is alive. Not before the engine has taken the request in."""

    @property
    def level(self) -> int:
        """Its priority in the queue; lower runs earlier. A key can keep its requests from running early."""
        return max(self.priority, self.context.principal.priority)


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
    if cut is not None and (request.images or request.unread_images):
        raise InvalidRequestError("A prompt with images cannot be truncated.", param="truncate_prompt_tokens")
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
    num_logprobs = request.params.prompt_logprobs
    if num_logprobs is None:
        return
    count = sum(map(len, prompts)) * (1 + num_logprobs) * request.n
    if count > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"The prompts' tokens have {count} log probabilities in the choices of this call, and "
            f"{_MAX_PROMPT_LOGPROBS} are allowed. Please ask for fewer, or in several calls.",
            param="prompt",
        )
