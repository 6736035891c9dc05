"""Texts of a call as tokens, as the model reads them and within its bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import ContextLengthError, InvalidRequestError
from penstock.gateway.apis.pooling.schemas import PoolingRequest
from penstock.gateway.models.language.prompts import TOKENS_OF_A_CALL
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.tokenizers import PromptTooLong, Tokenizer, TokenizerError

_LONG_CHARS = 16_384
"""A longer text is refused before all of it has been encoded, where it cannot fit."""

Input = str | list[int]
"""A text, or its tokens as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How long the texts of a call may be."""

    most: int
    """Tokens of a text or pair, special tokens included."""
    allowed: bool
    """Longer ones lose their last tokens; else they are refused."""
    of_second: int | None = None
    """Tokens that the second text of a pair keeps."""
    at_start: bool = False
    """They lose their first tokens instead of their last."""
    way_out: str = "truncate_prompt_tokens"
    """What lets longer texts be cut, in the caller's API."""

    def most_of(self, ids: list[int]) -> list[int]:
        """Token ids that are cut where that is allowed."""
        if not self.allowed or len(ids) <= self.most:
            return ids
        return ids[-self.most :] if self.at_start else ids[: self.most]


def truncation(request: PoolingRequest, model: PoolingModel, of_second: int | None = None) -> Cut:
    """As truncate_prompt_tokens (-1: the model's own limit) and truncation_side say. Raises InvalidRequestError."""
    limit, length = model.source.info.max_tokens, request.truncate_prompt_tokens
    if length is not None and not (length == -1 or 1 <= length <= limit):
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {limit}.", param="truncate_prompt_tokens"
        )
    return Cut(
        most=limit if length in (None, -1) else length or limit,
        allowed=length is not None,
        of_second=of_second,
        at_start=request.truncation_side == "left",
    )


def tokenize_inputs(
    model: PoolingModel, inputs: Sequence[Input], cut: Cut, *, prompt: str, add_special_tokens: bool, param: str
) -> list[TokenizedText]:
    """`prompt` goes before each text. Raises InvalidRequestError, ContextLengthError."""
    texts = [prompt + item for item in inputs if isinstance(item, str)]
    encoded = iter(_encode(model, texts, cut, param))
    template = model.tokenizer.template

    def tokenized() -> Iterator[TokenizedText]:
        for item in inputs:
            if isinstance(item, str) and add_special_tokens:
                joined = template.join([next(encoded)], cut.most if cut.allowed else None, cut_start=cut.at_start)
                yield TokenizedText(joined.ids, joined.types)
            else:
                yield TokenizedText(cut.most_of(next(encoded) if isinstance(item, str) else item))

    return _all_checked(model, tokenized(), cut, param)


def tokenize_pairs(
    model: PoolingModel, firsts: Sequence[str], seconds: Sequence[str], cut: Cut, param: str
) -> list[TokenizedText]:
    """`firsts` has one text for all of `seconds`, or as many. Raises InvalidRequestError, ContextLengthError."""
    encoded = _encode(model, [*firsts, *seconds], cut, param)
    template = model.tokenizer.pair_template
    behind = encoded[len(firsts) :]
    before = encoded[: len(firsts)] if len(firsts) == len(seconds) else encoded[:1] * len(seconds)
    pairs = zip(before, behind, strict=True)
    most = cut.most if cut.allowed else None
    joined = (template.join([a, b[: cut.of_second]], most, cut_start=cut.at_start) for a, b in pairs)
    return _all_checked(model, (TokenizedText(pair.ids, pair.types) for pair in joined), cut, param)


def _encode(model: PoolingModel, texts: Sequence[str], cut: Cut, param: str) -> list[list[int]]:
    """Without special tokens."""
    if model.recipe.lower_case:
        texts = [text.lower() for text in texts]
    try:
        if not cut.allowed and cut.of_second is None:
            _refuse_long(model.tokenizer, texts, cut, param)
        return model.tokenizer.encode_many(texts)
    except TokenizerError as error:
        raise InvalidRequestError(str(error), param=param) from None


def _refuse_long(tokenizer: Tokenizer, texts: Sequence[str], cut: Cut, param: str) -> None:
    for number, text in enumerate(texts):
        if len(text) > _LONG_CHARS:
            try:
                tokenizer.encode(text, add_special_tokens=False, limit=cut.most)
            except PromptTooLong:
                raise _too_long(number, f"more than {cut.most}", cut, param) from None


def _all_checked(model: PoolingModel, texts: Iterable[TokenizedText], cut: Cut, param: str) -> list[TokenizedText]:
    """As soon as they are too many together, no more are taken: each pair has a copy of a query that may be long."""
    checked: list[TokenizedText] = []
    total = 0
    for number, text in enumerate(texts):
        checked.append(_checked(model, text, number, cut, param))
        total += len(text)
        if total > TOKENS_OF_A_CALL:
            message = f"The texts of this call have more than {TOKENS_OF_A_CALL} tokens together."
            raise InvalidRequestError(f"{message} Please send them in several calls.", param=param)
    return checked


def _checked(model: PoolingModel, text: TokenizedText, number: int, cut: Cut, param: str) -> TokenizedText:
    if not len(text):
        raise InvalidRequestError(f"{param}: text {number} has no tokens.", param=param)
    if len(text) > cut.most:
        raise _too_long(number, str(len(text)), cut, param)
    vocab_size = model.source.info.vocab_size
    if model.tokenizer.vocab_size > vocab_size and max(text.ids) >= vocab_size:
        raise InvalidRequestError(f"{param}: text {number} has a token that the model lacks.", param=param)
    return text


def _too_long(number: int, length: str, cut: Cut, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"{param}: text {number} has {length} tokens, and this model's maximum is {cut.most}. Please shorten it or let "
        f"it be cut with {cut.way_out}.",
        param=param,
    )
