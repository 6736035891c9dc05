"""Token ids to text while they are generated, at a cost that does not grow with what went before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .decode_streams import ByteRunStream, ByteStream, DecodeStream, DiffStream, PieceStream
from .hf import Tokenizer
from .token_table import DecoderFamily


class IncrementalDetokenizer:
    """Turns one sample's token ids into text that is final as soon as it is returned.

    The concatenation of everything `push` and `flush` return is `tokenizer.decode` of all the ids, however they
    are divided among the calls. With `prompt_ids` it is what those ids add to the text of the prompt.
    """

    __slots__ = ("flush", "push")

    push: Callable[[Sequence[int]], str]
    """New text: never half a character, nothing that a later token could still change."""
    flush: Callable[[], str]
    """What was held back, once no more tokens come."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown`: special tokens that are text where the others are skipped. A tokenizer whose decoder only the
        library knows then shows all of them."""
        stream = _new_stream(tokenizer, skip_special_tokens, shown)
        if prompt_ids:
            stream.prime(prompt_ids)
        # Bound once: the hot path has one call less.
        self.push = stream.push
        self.flush = stream.flush


def _new_stream(tokenizer: Tokenizer, skip_special_tokens: bool, shown: frozenset[int]) -> DecodeStream:
    table = tokenizer.table_showing(shown) if skip_special_tokens else tokenizer.table
    match table.family:
        case DecoderFamily.BYTES:
            return ByteStream(table)
        case DecoderFamily.BYTE_RUNS:
            return ByteRunStream(table)
        case DecoderFamily.PIECES:
            return PieceStream(table)
        case DecoderFamily.GENERAL:
            return DiffStream(tokenizer, skip_special_tokens and not shown)
