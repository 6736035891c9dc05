"""Prompts from a file: ShareGPT's conversations, or records with `prompt` or `messages`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Call, Prompt
from penstock.loadtest.options import WorkloadOptions
from penstock.loadtest.workload.contents import CHATS, TAKE_IDS, Contents, spread

_HUMAN = frozenset({"human", "user"})
_ANSWER = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


class _Said(msgspec.Struct):
    by: str = msgspec.field(name="from")
    value: str


class _Record(msgspec.Struct):
    """One element of the file's array, or one of its lines."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    conversations: list[_Said] | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None


class _Turn(msgspec.Struct, frozen=True):
    prompt: Prompt
    output_tokens: int | None = None
    answer: str | None = None
    """As recorded; its length is asked for where nothing else is said and a tokenizer can count it."""


class Dataset:
    """Its sessions, each once, in an order that the seed gives."""

    def __init__(self, options: WorkloadOptions, contents: Contents, tag: str) -> None:
        """Raises LoadTestError for a file that cannot be read, with the place in it."""
        path = options.dataset or ""
        self._options = options
        self._contents = contents
        self._tag = tag
        self._sessions = []
        self.skipped = 0
        for place, record in _records(path):
            turns = _turns(record, place, options.turns, contents.protocol)
            if turns:
                self._sessions.append(turns)
            else:
                self.skipped += 1
        if not self._sessions:
            raise LoadTestError(f"dataset: {path} has no prompts")
        self.total = sum(map(len, self._sessions))
        contents.rng("order", tag).shuffle(self._sessions)

    def size(self, nth: int) -> int | None:
        return len(self._sessions[nth]) if nth < len(self._sessions) else None

    def calls(self, nth: int, number: int, index: int) -> list[Call]:
        rng = self._contents.rng("session", number)
        calls = []
        for turn, said in enumerate(self._sessions[nth]):
            output = spread(self._options.output_tokens, self._options.output_tokens_stddev, rng)
            if said.output_tokens is not None:
                output = said.output_tokens
            elif said.answer and self._contents.vocabulary is not None:
                output = max(1, self._contents.vocabulary.count(said.answer))
            call = Call(
                index=index + turn,
                prompt=said.prompt,
                prompt_tokens=self._contents.count(said.prompt),
                output_tokens=self._contents.output_tokens(output),
                delay=self._options.turn_delay if turn else 0.0,
                tag=self._tag,
            )
            calls.append(call)
        return calls


def _records(path: str) -> list[tuple[str, _Record]]:
    """With their places, for error messages."""
    try:
        data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise LoadTestError(f"dataset: {path}: {error.strerror}") from None
    if re.match(rb"\s*\[", data):
        try:
            decoded = msgspec.json.decode(data, type=list[_Record])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LoadTestError(f"dataset: {path}: {error}") from None
        return [(f"{path}, element {number}", record) for number, record in enumerate(decoded)]
    decode = msgspec.json.Decoder(_Record).decode
    records = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            records.append((place, decode(line)))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LoadTestError(f"dataset: {place}: {error}") from None
    return records


def _turns(record: _Record, place: str, most: int, protocol: str) -> list[_Turn]:
    """Empty: nothing to send. Raises LoadTestError for what the protocol has no place for."""
    forms = [value for value in (record.prompt, record.messages, record.conversations) if value is not None]
    if len(forms) != 1:
        raise LoadTestError(f"dataset: {place}: needs one of prompt, messages and conversations, has {len(forms)}")
    output = record.output_tokens if record.output_tokens is not None else record.max_tokens
    if output is not None and output < 1:
        raise LoadTestError(f"dataset: {place}: {output} output tokens")
    if record.conversations is not None:
        return _conversation(record.conversations, output)[:most]
    if most > 1:
        raise LoadTestError(f"turns: {place} is one request, not a conversation")
    if record.messages is not None and protocol not in CHATS:
        raise LoadTestError(f"dataset: {place}: messages need a protocol for chats, not {protocol}")
    if isinstance(record.prompt, list) and protocol not in TAKE_IDS:
        raise LoadTestError(f"dataset: {place}: {protocol} takes no token ids")
    prompt: Prompt | None = record.messages if record.prompt is None else record.prompt
    return [_Turn(prompt, output)] if prompt else []


def _conversation(said: list[_Said], output: int | None) -> list[_Turn]:
    """What the human said, each time with the answer that follows; what others say, as a system prompt, is left out."""
    turns = []
    for place, one in enumerate(said):
        if one.by not in _HUMAN or not one.value:
            continue
        after = said[place + 1] if place + 1 < len(said) else None
        turns.append(_Turn(one.value, output, after.value if after is not None and after.by in _ANSWER else None))
    return turns
