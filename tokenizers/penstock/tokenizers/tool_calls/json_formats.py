"""The formats whose calls are JSON objects behind a tag, and Llama's, which may have none."""

from __future__ import annotations

from dataclasses import replace

from ..parsing import Reading, Tags
from ..parsing.literals import read_name, read_value
from .call_form import object_form
from .stage import ToolCallStage, plain_arguments

_COLON = Tags(":")
_AFTER_MEMBER = Tags(",", "}")
_AFTER_CALL = Tags(",", "]")
_ARGUMENTS = ("arguments", "parameters")


class JsonCallStage(ToolCallStage):
    """Behind an opening: `{"name": ..., "arguments": {...}}`, or a list of such objects. `parameters` is another name
    for `arguments`."""

    def read_call(self, opening: str) -> Reading[bool]:
        return (yield from self.read_objects())

    def read_objects(self) -> Reading[bool]:
        yield from self.reader.skip_space()
        if (yield from self.reader.peek()) != "[":
            return (yield from ObjectCall(self).read())
        self.reader.take()
        while True:
            yield from self.reader.skip_space()
            if not (yield from ObjectCall(self).read()):
                return False
            self.reader.record()
            yield from self.reader.skip_space()
            if (yield from self.reader.one_of(_AFTER_CALL)) != ",":
                return True


class ObjectCall:
    """One object. The name begins the call, and other members mean nothing. Arguments that stand before the name are
    held back."""

    def __init__(self, stage: ToolCallStage) -> None:
        self._stage = stage
        self._reader = stage.reader
        self._begun = False
        self._id: str | None = None
        self._arguments: str | None = None
        """Those that stood before the name. Empty if they were passed on."""

    def read(self) -> Reading[bool]:
        """False if it is no call. What follows the object, or cannot be part of one, stays unread."""
        if (yield from self._reader.peek()) != "{":
            return False
        self._reader.take()
        separator: str | None = ","
        while separator == ",":
            yield from self._reader.skip_space()
            key = yield from read_name(self._reader)
            if key is None or not self._accepts(key):
                break
            yield from self._reader.skip_space()
            if not (yield from self._reader.one_of(_COLON)):
                break
            yield from self._reader.skip_space()
            if not (yield from self._read_member(key)):
                break
            yield from self._reader.skip_space()
            separator = yield from self._reader.one_of(_AFTER_MEMBER)
        if separator == "}":
            self._end()
        return self._begun

    def _accepts(self, key: str) -> bool:
        """False if an object with such a member is no call."""
        return True

    def _read_member(self, key: str) -> Reading[bool]:
        if key == "name" and not self._begun:
            return (yield from self._read_tool_name())
        if key in _ARGUMENTS and self._arguments is None:
            return (yield from self._read_arguments())
        if key == "id" and not self._begun and (yield from self._reader.peek()) == '"':
            self._id = yield from read_name(self._reader)
            return self._id is not None
        return (yield from read_value(self._reader, _drop))

    def _read_tool_name(self) -> Reading[bool]:
        name = yield from read_name(self._reader)
        if name:
            self._begin(name)
        return self._begun

    def _begin(self, name: str) -> None:
        self._stage.begin(name, self._id)
        self._begun = True
        self._stage.arguments(plain_arguments(self._arguments or ""))

    def _read_arguments(self) -> Reading[bool]:
        if self._begun:
            self._arguments = ""
            return (yield from self._stage.read_json_arguments())
        pieces: list[str] = []
        complete = yield from read_value(self._reader, pieces.append)
        self._arguments = "".join(pieces)
        return complete

    def _end(self) -> None:
        if self._begun and self._arguments is None:
            self._stage.arguments("{}")


class KnownObjectCall(ObjectCall):
    """One object without a tag before it. It is a call if it names a tool of the request, has arguments, and has
    nothing else before these but its type."""

    _name = ""

    def _accepts(self, key: str) -> bool:
        return self._begun or key in ("name", "type", *_ARGUMENTS)

    def _read_member(self, key: str) -> Reading[bool]:
        if not self._begun and key in _ARGUMENTS and self._name:
            self._begin(self._name)
        return (yield from super()._read_member(key))

    def _read_tool_name(self) -> Reading[bool]:
        name = yield from read_name(self._reader)
        if name is None or name not in self._stage.tools:
            return False
        self._name = name
        if self._arguments is not None:
            self._begin(name)
        return True


def _drop(text: str) -> None:
    pass


_HERMES = object_form("arguments", tags=("<tool_call>",), before="<tool_call>\n", behind="\n</tool_call>", between="\n")


class HermesStage(JsonCallStage):
    """Hermes 2 Pro and later, Qwen 2.5, Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    The format is that of NousResearch/Hermes-Function-Calling, and of the chat templates of these models.
    """

    openings = ("<tool_call>",)
    closings = ("</tool_call>",)
    form = _HERMES


class GraniteStage(JsonCallStage):
    """IBM Granite. Version 3 writes a list behind `<|tool_call|>` or `<tool_call>`, version 4 what Hermes writes, and
    granite-20b-functioncalling an object behind each `<function_call>`.

    The formats are those of the models' chat templates.
    """

    openings = ("<|tool_call|>", "<tool_call>", "<function_call>")
    closings = ("</tool_call>",)
    form = replace(_HERMES, tags=openings)


class Phi4MiniStage(JsonCallStage):
    """Phi-4-mini: `functools[{"name": ..., "arguments": {...}}]`, or the same list between `<|tool_call|>` and
    `<|/tool_call|>`.

    The format is what vLLM's parser of this name reads. The second form has tokens of its own in the model's tokenizer.
    """

    openings = ("functools", "<|tool_call|>")
    closings = ("<|/tool_call|>",)
    form = object_form("arguments", tags=openings, before="", behind="", between=", ", begin="functools[", end="]")


class JsonListStage(JsonCallStage):
    """`[{"name": ..., "parameters": {...}}]` as all of the answer: what a grammar makes models write whose own format
    has no `form`.

    The format is that of vLLM's answers where a call is required.
    """

    form = object_form("parameters", tags=(), before="", behind="", between=", ", begin="[", end="]")

    def parse(self) -> Reading[None]:
        yield from self.pass_space()
        if (yield from self.read_objects()):
            yield from self.reader.skip_space()
        else:
            self.text(self.reader.recorded())
        yield from self.reader.everything(self.text)


class LlamaJsonStage(ToolCallStage):
    """Llama 3.1 and later: `{"name": ..., "parameters": {...}}` as all of the answer, several with `;` between them.
    `<|python_tag|>` may stand before them, in Llama 4 `<|python_start|>`.

    The format is that of Meta's prompt formats and the models' chat templates. Without a tag it is a call only at the
    start of the text, and only if it names a tool of the request.
    """

    openings = ("<|python_tag|>", "<|python_start|>")
    closings = ("<|python_end|>",)
    separators = (";",)
    form = object_form("parameters", tags=openings, before="", behind="", between="; ")

    def read_untagged_call(self) -> Reading[bool]:
        yield from self.pass_space()
        return (yield from KnownObjectCall(self).read())

    def read_call(self, opening: str) -> Reading[bool]:
        yield from self.reader.skip_space()
        read = ObjectCall if opening in self.openings else KnownObjectCall
        return (yield from read(self).read())


_ID = Tags("[CALL_ID]")
_MISTRAL_ARGUMENTS = Tags("[ARGS]")


class MistralStage(JsonCallStage):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` up to version 7 of the tokenizer. From version 11 on
    `[TOOL_CALLS]NAME[ARGS]{...}` for each call; `[ARGS]` may be missing, and `[CALL_ID]ID` may stand before it.

    The format is that of mistral-common, which renders the prompts of these models.
    """

    openings = ("[TOOL_CALLS]",)
    inner = ("[CALL_ID]", "[ARGS]")
    form = object_form("arguments", tags=openings, before="", behind="", between=", ", begin="[TOOL_CALLS][", end="]")

    def read_call(self, opening: str) -> Reading[bool]:
        yield from self.reader.skip_space()
        name = yield from self.read_plain_name()
        if not name:
            return (yield from self.read_objects())
        id = (yield from self.read_plain_name()) if (yield from self.reader.one_of(_ID)) else None
        yield from self.reader.one_of(_MISTRAL_ARGUMENTS)
        return (yield from self.begin_with_object(name, id or None))
