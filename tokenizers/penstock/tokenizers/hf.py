"""A tokenizer from a local Hugging Face folder, on the `tokenizers` library alone."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from .bounded import BoundedEncoder
from .errors import TokenizerError, encode_once, is_of_the_library
from .files import TokenizerFiles, read_tokenizer_files
from .special_tokens import SpecialTextGuard
from .token_table import DecoderKind, TokenTable, build_token_table


@dataclass(frozen=True, slots=True)
class JoinedText:
    ids: list[int]
    types: list[int]
    """Which of the two texts each token belongs to, as the model was trained to be told."""


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """Special tokens before, between and behind the texts' own."""

    specials: tuple[JoinedText, ...]
    """One more than there are texts."""
    types: tuple[int, ...]
    """Of each text's own tokens."""

    @property
    def num_specials(self) -> int:
        return sum(len(special.ids) for special in self.specials)

    def join(self, texts: Sequence[Sequence[int]], most: int | None = None, *, cut_start: bool = False) -> JoinedText:
        """`texts`: token ids without special tokens, one or two as the template has. With `most`, the longer text loses
        its last tokens first, until all fit; with `cut_start` its first ones."""
        if most is not None:
            kept = _kept([len(text) for text in texts], max(0, most - self.num_specials))
            texts = [
                text[len(text) - num :] if cut_start else text[:num] for text, num in zip(texts, kept, strict=True)
            ]
        ids, types = list(self.specials[0].ids), list(self.specials[0].types)
        for text, kind, behind in zip(texts, self.types, self.specials[1:], strict=True):
            ids += [*text, *behind.ids]
            types += [kind] * len(text) + behind.types
        return JoinedText(ids, types)


def read_template(backend: tokenizers.Tokenizer, *texts: str) -> TextTemplate:
    """As the backend joins these texts, one or two. Raises TokenizerError where it loses one of them."""
    first, second = texts if len(texts) == 2 else (texts[0], None)
    encoded = backend.encode(first, second)
    tokens = zip(encoded.sequence_ids, encoded.ids, encoded.type_ids, strict=True)
    specials = [JoinedText([], [])]
    types: list[int] = []
    for number, group in groupby(tokens, key=lambda token: token[0]):
        parts = list(group)
        if number is None:
            specials[-1] = JoinedText([part[1] for part in parts], [part[2] for part in parts])
        else:
            types.append(parts[0][2])
            specials.append(JoinedText([], []))
    if len(types) != len(texts):
        raise TokenizerError("the tokenizer does not say how texts are joined")
    return TextTemplate(tuple(specials), tuple(types))


def _kept(lengths: Sequence[int], room: int) -> list[int]:
    """Tokens of each text, as `longest_first` of the `tokenizers` library has it."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    short = min(first, second, room // 2)
    long = room - short
    return [long, short] if first > second else [short, long]


class _Format(NamedTuple):
    """What a model family calls its tokens."""

    prefix: str
    suffix: str
    middle: str
    """Empty: the answer follows the prefix, behind which nothing stands."""
    ends: tuple[str, ...] = ()
    """Tokens that end what is filled in, beside EOS."""


_FORMATS = (
    # Qwen2.5-Coder, CodeGemma
    _Format(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>")
    ),
    # StarCoder, Granite Code
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),  # SantaCoder
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Format("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)


class FillInMiddle(NamedTuple):
    """One model's way to ask for it, in token ids."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    begin: tuple[int, ...] = ()
    """What its tokenizer puts before every text."""

    def prompt(self, before: list[int], behind: list[int]) -> list[int]:
        """`before`, `behind`: the texts around what is missing, without special tokens."""
        if self.middle is None:
            return [*self.begin, self.suffix, *behind, self.prefix, *before]
        return [*self.begin, self.prefix, *before, self.suffix, *behind, self.middle]


def find_fill_in_middle(id_of: Callable[[str], int | None], begin: tuple[int, ...]) -> FillInMiddle | None:
    """`id_of`: a token's id by its text, as the vocabulary writes it; `begin`: what stands before every text. None: the
    vocabulary has no such tokens."""
    for one in _FORMATS:
        prefix, suffix, middle = id_of(one.prefix), id_of(one.suffix), id_of(one.middle) if one.middle else None
        if prefix is not None and suffix is not None and (middle is not None or not one.middle):
            ends = frozenset(token_id for end in one.ends if (token_id := id_of(end)) is not None)
            return FillInMiddle(prefix, suffix, middle, ends, begin)
    return None


_ANY_TEXT = "a"
"""To see what the tokenizer puts around texts."""


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads.

    `folder` holds tokenizer.json and what belongs to it. Raises TokenizerError naming what is missing or broken.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self._backend, files = load_backend(folder)
        self.special_tokens: dict[str, str] = dict(files.special_tokens)
        """By role, as chat templates know them: `bos_token`, `eos_token`, `pad_token`, `unk_token`, ..."""
        self.chat_templates: dict[str, str] = dict(files.chat_templates)
        """By name, for folders with several (`default`, `tool_use`, `rag`)."""
        added = self._backend.get_added_tokens_decoder()
        self.added_texts: dict[str, int] = {token.content: i for i, token in added.items()}
        """Ids of the tokens that are found before a text is split, by their text: special tokens, and tags like those
        of Qwen's tool calls."""
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        """One more than the highest token id."""
        # Built here and not on demand: it takes half a second for a large vocabulary.
        self.table: TokenTable = self._build_table()
        """What each id contributes to a text, special tokens included."""
        self.text_table: TokenTable = self.table.without(self.special_ids)
        """The same when special tokens are skipped."""
        self._bounded = BoundedEncoder(self._backend, self._encode)
        self._tables_showing: dict[frozenset[int], TokenTable] = {}

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.id_of(self.eos_token)

    @property
    def chat_template(self) -> str | None:
        """The template called `default`, or the only one. None: this is no chat model, or each has another purpose."""
        only = next(iter(self.chat_templates.values())) if len(self.chat_templates) == 1 else None
        return self.chat_templates.get("default", only)

    def encode(self, text: str, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text become their ids.

        A long text with more than `limit` tokens raises PromptTooLong as soon as that is certain.
        """
        if limit is None:
            return self._encode(text, add_special_tokens)
        return self._bounded.encode(text, add_special_tokens, limit)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return encode_once(self._backend, text, add_special_tokens)

    def special_text_guard(self, template_source: str, own_tags: Collection[str] = ()) -> SpecialTextGuard:
        """Keeps clients' texts from becoming special tokens in the prompts of a chat template."""
        return SpecialTextGuard(self._backend, template_source, own_tags)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens: `template` puts these around them."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise TokenizerError("text is not valid Unicode") from None
        except BaseException as error:
            if not is_of_the_library(error):
                raise
            raise TokenizerError(f"the texts cannot be tokenized: {error}") from None
        return [list(encoding.ids) for encoding in encodings]

    @cached_property
    def template(self) -> TextTemplate:
        """Of one text. Raises TokenizerError."""
        return read_template(self._backend, _ANY_TEXT)

    @cached_property
    def pair_template(self) -> TextTemplate:
        """Of two texts. Raises TokenizerError."""
        return read_template(self._backend, _ANY_TEXT, _ANY_TEXT)

    @cached_property
    def fill_in_middle(self) -> FillInMiddle | None:
        """None: the vocabulary has no tokens for it."""
        begin = [token_id for token_id in self._encode("", True) if token_id != self.eos_token_id]
        return find_fill_in_middle(self.id_of, tuple(begin))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids` taken as one text from its start; ids the vocabulary lacks contribute nothing."""
        try:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        except OverflowError:
            raise TokenizerError("a token id is out of range") from None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` contributes inside a text; a single token may hold a part of a character.

        Nothing for ids without a token: many models have more outputs than their tokenizer has tokens.
        """
        partial = self.table.partial.get(token_id)
        if partial is not None:
            return partial
        text = self.table.texts.get(token_id)
        if text is None:
            if not self._has_token(token_id):
                return b""
            text = self.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def token_text(self, token_id: int) -> str:
        r"""A printable form for logprobs: the token's text, or `bytes:\xe2\x82` where that is not whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it (`<|im_end|>`, `Ġthe`)."""
        token_id = self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    def token_of(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (`<|im_end|>`, `Ġthe`)."""
        token = self._backend.id_to_token(token_id)
        return None if token is None else str(token)

    def _build_table(self) -> TokenTable:
        backend = self._backend
        tokens = {i: token for i in range(self.vocab_size) if (token := backend.id_to_token(i)) is not None}
        decoder = backend.decoder
        # A decoder's pickled state is its section of tokenizer.json; serialising the vocabulary too would be slow.
        section: dict[str, Any] | None = None if decoder is None else json.loads(decoder.__getstate__())
        return build_token_table(section, tokens)

    def table_showing(self, shown: frozenset[int]) -> TokenTable:
        """`text_table` with these special tokens in the text. A tokenizer is asked for a few sets at most."""
        if not shown:
            return self.text_table
        if shown not in self._tables_showing:
            self._tables_showing[shown] = self.table.without(self.special_ids - shown)
        return self._tables_showing[shown]

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of those that are special tokens."""
        ids = (self._backend.token_to_id(text) for text in texts)
        return frozenset(i for i in ids if i in self.special_ids)

    def is_silent(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the decoder never gets to see this id: skipped, or not in the vocabulary."""
        if token_id in self.special_ids:
            return skip_special_tokens
        if self.table.family is not DecoderKind.GENERAL:
            return token_id not in self.table.texts and token_id not in self.table.partial
        return not self._has_token(token_id)

    def _has_token(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None


def load_backend(folder: Path) -> tuple[tokenizers.Tokenizer, TokenizerFiles]:
    """The library's tokenizer with all tokens that the folder's files name, and what the files say. Raises
    TokenizerError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(_what_is_missing(folder))
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes().removeprefix(BOM_UTF8))
    except BaseException as error:
        if not is_of_the_library(error):
            raise
        raise TokenizerError(f"{path} is not a tokenizer of the `tokenizers` library: {error}") from None
    # Files saved by a training script may cut or pad every text they encode.
    backend.no_truncation()
    backend.no_padding()
    files = read_tokenizer_files(folder)
    _add_tokens(backend, files)
    return backend, files


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if (folder / "tokenizer.model").is_file():
        return (
            f"{folder} has tokenizer.model but no tokenizer.json; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return (
            f"{folder} has vocab.json and merges.txt but no tokenizer.json; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    return f"{folder} has no tokenizer.json"


def _add_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Adds tokens that only the side files know, and marks the special ones as such.

    A token that would get another id than the file says is left out: the model has no row for it.
    """
    for token_id, spec in sorted(files.added_tokens.items()):
        known = backend.token_to_id(spec.content)
        if known == token_id or (known is None and token_id == backend.get_vocab_size(with_added_tokens=True)):
            token = tokenizers.AddedToken(spec.content, special=spec.special, **spec.flags)
            (backend.add_special_tokens if spec.special else backend.add_tokens)([token])
    specials = [*files.special_tokens.values(), *files.extra_special_tokens]
    known_specials = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    for content in specials:
        if content not in known_specials and backend.token_to_id(content) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
