"""Token ids to text while they are generated, at a cost that does not grow with what went before."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Protocol

from .hf import Tokenizer
from .token_table import DecoderKind, TokenTable

# One incremental decoder for each family of `token_table.DecoderFamily`.
#
# Each has a fast path for tokens that are text of their own, which is nearly all of them.

_REPLACEMENT = "\ufffd"


class DecodeStream(Protocol):
    """State of one text that is being decoded."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The final text that these tokens add."""

    def flush(self) -> str:
        """The text held back so far; the stream is at its end."""

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Continue as if `prompt_ids` had been decoded and their text were out already."""


class ByteStream:
    """Tokens are bytes; a character is out once its last byte is there."""

    __slots__ = ("_partial", "_pending", "_pending_is_prompt", "_texts")

    def __init__(self, table: TokenTable) -> None:
        self._texts = table.texts
        self._partial = table.partial
        self._pending = b""
        self._pending_is_prompt = False

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._pending:
            texts = self._texts
            try:
                return "".join([texts[i] for i in token_ids])
            except KeyError:
                pass
        return self._push_bytes(token_ids)

    def _push_bytes(self, token_ids: Iterable[int]) -> str:
        data = bytearray(self._pending)
        for token_id in token_ids:
            partial = self._partial.get(token_id)
            data += self._texts.get(token_id, "").encode() if partial is None else partial
        if len(data) == len(self._pending):
            return ""
        text, used = codecs.utf_8_decode(data, "replace", False)
        if self._pending_is_prompt and text:
            # The prompt's last bytes turned out to be no character; that is not for the answer to show.
            if text[0] == _REPLACEMENT and not data.startswith(_REPLACEMENT.encode()):
                text = text[1:]
            self._pending_is_prompt = False
        self._pending = bytes(data[used:])
        return text

    def flush(self) -> str:
        text = "" if self._pending_is_prompt else self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def prime(self, prompt_ids: Sequence[int]) -> None:
        tail = list(takewhile(lambda i: not self._texts.get(i), reversed(prompt_ids)))
        self._push_bytes(reversed(tail))
        self._pending_is_prompt = bool(self._pending)


class ByteRunStream:
    """Tokens are text; a run of byte tokens is text if all of it is valid UTF-8, else one U+FFFD for each byte.

    Hence nothing of a run is final before the first token that is no byte.
    """

    __slots__ = ("_prompt_bytes", "_run", "_shown_bytes", "_strip", "_table", "_texts")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._texts = table.texts
        self._run = bytearray()
        self._strip = table.strip_count
        self._prompt_bytes = 0
        """How many bytes of the run are the prompt's ..."""
        self._shown_bytes = 0
        """... and how many of these were whole characters there."""

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._run and not self._strip:
            texts = self._texts
            try:
                return "".join([texts[i] for i in token_ids])
            except KeyError:
                pass
        return self._push_each(token_ids)

    def _push_each(self, token_ids: Iterable[int]) -> str:
        out = []
        for token_id in token_ids:
            byte = self._table.partial.get(token_id)
            if byte is not None:
                self._run += byte
                continue
            text = self._texts.get(token_id)
            if text is None:
                continue
            if self._run:
                out.append(self._end_run())
            out.append(text)
        return self._strip_start("".join(out))

    def flush(self) -> str:
        return self._strip_start(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        shown, prompt = self._shown_bytes, self._prompt_bytes
        self._shown_bytes = self._prompt_bytes = 0
        if len(run) == prompt:
            return ""
        try:
            run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * (len(run) - prompt)
        return run[shown:].decode()

    def _strip_start(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._table.strip_char:
                self._strip = 0
            else:
                self._strip -= 1
                text = text[1:]
        return text

    def prime(self, prompt_ids: Sequence[int]) -> None:
        for token_id in prompt_ids:
            if not self._strip:
                break
            self._push_each((token_id,))
        tail = list(takewhile(lambda i: i not in self._texts, reversed(prompt_ids)))
        self._run = bytearray().join(self._table.partial.get(i, b"") for i in reversed(tail))
        if self._run:
            self._strip = 0  # whatever these bytes turn out to be, the text does not begin after them
        self._prompt_bytes = len(self._run)
        try:
            self._shown_bytes = codecs.utf_8_decode(self._run, "strict", False)[1]
        except UnicodeDecodeError:
            self._shown_bytes = self._prompt_bytes


class PieceStream:
    """Tokens are text; the first one is written without its word-start marks."""

    __slots__ = ("_first_texts", "_texts")

    def __init__(self, table: TokenTable) -> None:
        self._texts = table.texts
        self._first_texts = table.first_texts

    def push(self, token_ids: Sequence[int]) -> str:
        if self._first_texts is None:
            texts = self._texts
            try:
                return "".join([texts[i] for i in token_ids])
            except KeyError:
                pass
        return "".join([self._text_of(i) for i in token_ids])

    def _text_of(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            return ""
        if self._first_texts is not None:
            text = self._first_texts(token_id)
            self._first_texts = None
        return text

    def flush(self) -> str:
        return ""

    def prime(self, prompt_ids: Sequence[int]) -> None:
        if any(i in self._texts for i in reversed(prompt_ids)):
            self._first_texts = None


class DiffStream:
    """For any decoder: decodes a window with and without the new tokens; what the longer text adds is new.

    Exact for decoders whose text of a token depends on at most `CONTEXT` tokens before it and whose text only grows
    at its end, but for the U+FFFD of an unfinished character.
    """

    CONTEXT = 8
    MOST_HELD = 32
    """So many tokens are no unfinished character, whatever their text ends with."""

    __slots__ = ("_context", "_held", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        # Ids without text of their own would crowd the context out.
        self._held += [i for i in token_ids if not self._tokenizer.is_silent(i, self._skip)]
        return self._new_text(self.MOST_HELD) if self._held else ""

    def flush(self) -> str:
        return self._new_text(0) if self._held else ""

    def _new_text(self, most_held: int) -> str:
        """What the held tokens add; `""` while fewer than `most_held` are held and their text may still change."""
        before = self._tokenizer.decode(self._context, self._skip)
        after = self._tokenizer.decode(self._context + self._held, self._skip)
        settled = after.startswith(before) and not after.endswith(_REPLACEMENT)
        if not settled and len(self._held) < most_held:
            return ""
        self._context = (self._context + self._held)[-self.CONTEXT :]
        self._held = []
        return after[len(before) :]

    def prime(self, prompt_ids: Sequence[int]) -> None:
        visible = (i for i in reversed(prompt_ids) if not self._tokenizer.is_silent(i, self._skip))
        self._context = [i for i, _ in zip(visible, range(self.CONTEXT), strict=False)][::-1]


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
        case DecoderKind.BYTES:
            return ByteStream(table)
        case DecoderKind.BYTE_RUNS:
            return ByteRunStream(table)
        case DecoderKind.PIECES:
            return PieceStream(table)
        case DecoderKind.GENERAL:
            return DiffStream(tokenizer, skip_special_tokens and not shown)
