"""Checks of what needs no computation: chat template, end tokens, tokenizer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from penstock.gateway.commands.verify.prompts import ROUND_TRIPS, WEATHER, Message
from penstock.gateway.commands.verify.report import Notes, Result, Row
from penstock.gateway.commands.verify.subject import Subject
from penstock.tokenizers import ChatTemplateError, Tokenizer
from penstock.tokenizers.messages import NO_NEEDS

NO_TEMPLATE = "the model has no chat template"
_USER, _ANSWER, _SYSTEM, _LATER, _RESULT = "Zebra4127", "Walrus5238", "Ostrich6349", "Badger7451", "Heron8562"
"""Words that a template does not write itself, to find them in what it renders."""
_MARKUP = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|</?[a-z]+_of_[a-z]+>")
"""How special tokens of chats are written: <|im_start|>, <｜User｜>, <end_of_turn>."""
_BEGINNINGS = re.compile(
    r"<\|(im_start|start_header_id|header_start|start_of_role|start|turn|user|assistant|system)\|>|<｜(User|Assistant)｜>"
    r"|<start_of_turn>|<\|START_OF_TURN_TOKEN\|>|\[INST\]|<\|(start_)?role(_start)?\|>|\[\|(user|assistant)\|\]"
)
"""Tokens of known families that begin a turn."""

_TURNS: list[Message] = [
    {"role": "user", "content": _USER},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _LATER},
]
_CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Heron"}'}}
_WITH_CALL: list[Message] = [
    {"role": "user", "content": _USER},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": _RESULT},
]


class _Chat(NamedTuple):
    name: str
    messages: list[Message]
    words: tuple[str, ...]
    """Which the prompt must have."""
    tools: list[Message] | None = None
    otherwise: Result = "FAIL"
    """The result where it cannot be rendered."""


_CHATS = (
    _Chat("a question", _TURNS[:1], (_USER,)),
    _Chat("several turns", _TURNS, (_USER, _ANSWER, _LATER)),
    # Some families have no system messages; their templates say so.
    _Chat("a system message", [{"role": "system", "content": _SYSTEM}, *_TURNS], (_SYSTEM, _USER), None, "warn"),
)
_TOOL_CHATS = (
    _Chat("tools", _TURNS[:1], (_USER, "get_weather", "city"), [WEATHER]),
    _Chat("calls and results in the history", _WITH_CALL, (_USER, "get_weather", "Heron", _RESULT), [WEATHER]),
)


def check_template(subject: Subject) -> Row:
    """Whether it renders what chats consist of, in words that the model knows."""
    notes = Notes("chat template")
    if subject.model.chat_template is None:
        notes.add("skipped", f"{NO_TEMPLATE}, so it answers no chats")
        return notes.row()
    calls_tools = subject.model.parsers.tools is not None
    chats = (*_CHATS, *_TOOL_CHATS) if calls_tools else _CHATS
    works = [chat.name for chat in chats if _renders(subject, chat, notes)]
    if works:
        notes.add("pass", f"renders {', '.join(works)}")
    for name, template in subject.model.chat_template.by_name.items():
        if template.needs != NO_NEEDS:
            notes.add("pass", f"the template {name} insists on {template.needs}")
    if not calls_tools:
        notes.add("pass", "no tool parser fits it, so chats have no tools")
    if _CHATS[0].name in works:
        _check_markup(subject.model.tokenizer, subject.render(_TURNS[:1], opens=True).text, notes)
        _check_generation_prompt(subject, notes)
        _check_special_text(subject, notes)
    return notes.row(renders=works, calls_tools=calls_tools)


def _renders(subject: Subject, chat: _Chat, notes: Notes) -> bool:
    """With all that was said."""
    try:
        text = subject.render(chat.messages, chat.tools, opens=True).text
    except ChatTemplateError as error:
        notes.add(chat.otherwise, f"fails with {chat.name}: {error}")
        return False
    missing = [word for word in chat.words if word not in text]
    if missing:
        notes.add(chat.otherwise, f"with {chat.name}, leaves out {len(missing)} of {len(chat.words)} texts")
    return not missing


def _check_markup(tokenizer: Tokenizer, prompt: str, notes: Notes) -> None:
    """What a template of another family writes are no tokens of this model, and the model's own are not written."""
    written = {match[0] for match in _MARKUP.finditer(prompt)}
    unknown = sorted(text for text in written if tokenizer.id_of(text) is None)
    own = sorted(text for text in tokenizer.added_texts if _BEGINNINGS.fullmatch(text))
    turns = prompt.removeprefix(tokenizer.bos_token or "")
    unused = own and not any(text in turns for text in own)
    if unknown and unused:
        notes.add(
            "FAIL",
            f"it is another model's: it writes {', '.join(unknown)}, which the tokenizer does not know, and not "
            f"{', '.join(own)}, which begin turns there",
        )
    elif unknown:
        notes.add("warn", f"it writes {', '.join(unknown)}, which are no tokens of the model")
    elif unused:
        notes.add("warn", f"it does not write {', '.join(own)}, with which the tokenizer's turns begin")


def _check_generation_prompt(subject: Subject, notes: Notes) -> None:
    """What stands before an answer in a history must stand there when an answer is to be generated."""
    opened = subject.render(_TURNS[:1], opens=True).text
    if opened != subject.render(_TURNS[:1]).text:
        return
    try:
        before = subject.render(_TURNS[:2]).text.partition(_ANSWER)[0]
    except ChatTemplateError:
        return
    lacking = before.removeprefix(opened).strip()
    if before.startswith(opened) and lacking:
        notes.add("warn", f"it begins answers in a history with {lacking!r}, but not those that are to be generated")


def _check_special_text(subject: Subject, notes: Notes) -> None:
    """Clients must not be able to end a turn."""
    model = subject.model
    ends = [text for i in subject.info.eos_token_ids if (text := model.tokenizer.token_of(i))]
    if model.guard is None or not ends:
        return

    def count(content: str) -> int:
        prompt = subject.render([{"role": "user", "content": content}], opens=True)
        ids = prompt.tokenizer.encode(prompt.text, add_special_tokens=False)
        return sum(token_id in subject.info.eos_token_ids for token_id in ids)

    if count(" ".join(ends)) > count(_USER):
        notes.add("FAIL", "the text of an end token in a message becomes that token")


def check_end_tokens(subject: Subject) -> Row:
    """Whether answers end where the template ends them in a history."""
    notes, tokenizer = Notes("end tokens"), subject.model.tokenizer
    ends = {i: tokenizer.token_of(i) for i in subject.info.eos_token_ids}
    listed = ", ".join(f"{text} ({i})" for i, text in ends.items())
    if not ends:
        notes.add("FAIL", "there is none: answers end only at their limit")
        return notes.row(end_tokens={})
    nameless = [i for i, text in ends.items() if text is None]
    if nameless:
        notes.add("warn", f"the tokenizer has no token {', '.join(map(str, nameless))}")
    for i, text in ends.items():
        if text and not (text[0] in "<[" and text[-1] in ">]"):
            declared = i in tokenizer.added_texts.values() and len(text) > 3
            notes.add("warn" if declared else "FAIL", f"{text!r} ({i}) is ordinary text, and would cut answers short")
    tail = _after_answer(subject)
    if tail is None:
        notes.add("pass", listed)
    else:
        _check_tail(tokenizer, tail, list(ends), listed, notes)
    return notes.row(end_tokens=ends, turn_ends_with=tail)


def _after_answer(subject: Subject) -> str | None:
    """What the template writes behind an answer; None: it cannot be seen."""
    if subject.model.chat_template is None:
        return None
    try:
        _, answer, tail = subject.render(_TURNS[:2]).text.rpartition(_ANSWER)
    except ChatTemplateError:
        return None
    return tail if answer else None


def _check_tail(tokenizer: Tokenizer, tail: str, ends: Sequence[int], listed: str, notes: Notes) -> None:
    ids = tokenizer.encode(tail, add_special_tokens=False)
    added = set(tokenizer.added_texts.values())
    marks = [i for i in ids if i in added or i in ends]
    if marks and marks[0] in ends:
        notes.add("pass", f"{listed}; the template ends answers with {tokenizer.token_of(marks[0])}")
    elif any(i in ends for i in marks):
        first = tokenizer.token_of(marks[0])
        notes.add("warn", f"{listed}; the template ends answers with {first}, which is none of them, and then with one")
    elif marks or _MARKUP.search(tail):
        notes.add("FAIL", f"the template ends answers with {tail.strip()!r}, which is none of {listed}")
    else:
        notes.add("warn", f"{listed}; the template writes none of them behind an answer, but {tail!r}")


def check_tokenizer(subject: Subject) -> Row:
    """Whether texts survive it, and whether the model has all of its tokens."""
    notes, tokenizer = Notes("tokenizer"), subject.model.tokenizer
    rows, highest, broken = subject.info.vocab_size, 0, []
    texts = (*ROUND_TRIPS, *(text for i in subject.info.eos_token_ids if (text := tokenizer.token_of(i))))
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        highest = max((highest, *ids))
        again = tokenizer.decode(ids, skip_special_tokens=False)
        if again != text:
            broken.append((text, again))
    serious = [(text, again) for text, again in broken if plain(text) != plain(again)]
    if highest >= rows:
        notes.add("FAIL", f"it makes token {highest}, and the model has rows for {rows}")
    elif tokenizer.vocab_size > rows:
        notes.add("warn", f"it has {tokenizer.vocab_size} tokens, and the model has rows for {rows}")
    if serious:
        text, again = serious[0]
        result: Result = "FAIL" if text == texts[0] else "warn"
        notes.add(result, f"{len(serious)} of {len(texts)} texts come back changed: {_difference(text, again)}")
    elif broken:
        notes.add("pass", f"{len(broken)} of {len(texts)} texts come back with other spaces or composed characters")
    if not broken:
        notes.add("pass", f"{len(texts)} texts come back as they were; {tokenizer.vocab_size} tokens, {rows} rows")
    return notes.row(texts=len(texts), changed=len(broken), tokens=tokenizer.vocab_size, rows=rows)


def plain(text: str) -> str:
    """Without what many tokenizers normalize on purpose: composed characters, and how much space there is."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _difference(text: str, again: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(text, again, strict=False)) if a != b), min(len(text), len(again)))
    begin = max(0, place - 5)
    return f"{text[begin : place + 15]!r} as {again[begin : place + 15]!r}"
