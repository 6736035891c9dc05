"""The texts of a call as token ids: on which thread they are encoded, and when they are too long."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.errors import ContextLengthError, InvalidRequestError
from penstock.gateway.front.work_pool import WorkPool
from penstock.gateway.llm.models import LoadedModel
from penstock.tokenizers import PromptTooLong, SealedTokenizer, Tokenizer, TokenizerError

_INLINE_CHARS = 4096
"""Up to this many characters of a call are encoded on the event loop (well under a millisecond); more in a pool."""
TOKENS_OF_A_CALL = 1_048_576
"""Of all texts of a call together, unless the context alone is longer: no more than may wait by default."""


async def encode_prompts(
    model: LoadedModel,
    texts: Sequence[str],
    pool: WorkPool,
    *,
    add_special_tokens: bool,
    tokenizer: Tokenizer | SealedTokenizer | None = None,
    cut: bool = False,
) -> list[list[int]]:
    """Token ids of each text. `tokenizer`: the model's if None; `cut`: the caller will cut texts that do not fit.

    Raises InvalidRequestError for text that cannot be encoded, OverloadedError, and, without `cut`, ContextLengthError
    for a text that is so long that encoding all of it would be wasted. The caller checks the length of the others.
    """
    tokenizer = tokenizer or model.tokenizer
    size = sum(map(len, texts))
    if size <= _INLINE_CHARS:
        return _encode_all(model, tokenizer, texts, add_special_tokens, cut)
    return await pool.run(size, _encode_all, model, tokenizer, texts, add_special_tokens, cut)


def _encode_all(
    model: LoadedModel,
    tokenizer: Tokenizer | SealedTokenizer,
    texts: Sequence[str],
    add_special_tokens: bool,
    cut: bool,
) -> list[list[int]]:
    context_length = model.engine.info.context_length
    limit = context_length - 1  # leaves room for one token of the completion
    room = total = max(limit, TOKENS_OF_A_CALL)
    limit = total if cut else limit
    prompts = []
    for text in texts:
        try:
            ids = tokenizer.encode(text, add_special_tokens, limit=min(limit, room))
        except PromptTooLong as error:
            raise _too_long(error, context_length) if error.limit == limit else _too_many(total) from None
        except TokenizerError as error:
            raise InvalidRequestError(str(error), param="prompt") from None
        room -= len(ids)
        if room < 0 and len(texts) > 1:
            raise _too_many(total)
        prompts.append(ids)
    return prompts


def _too_long(error: PromptTooLong, context_length: int) -> ContextLengthError:
    length = f"more than {error.limit} tokens" if error.certain else "more characters than are expected to fit"
    return ContextLengthError(
        f"This model's maximum context length is {context_length} tokens. However, your prompt has {length}. Please "
        "reduce the length of the prompt.",
        param="prompt",
    )


def _too_many(total: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The prompts of this call have more than {total} tokens together. Please send them in several calls.",
        param="prompt",
    )
