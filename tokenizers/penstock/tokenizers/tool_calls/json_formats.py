"""The formats whose calls are JSON objects behind a tag, and Llama's, which may have none."""

from __future__ import annotations

from dataclasses import replace

from ..parsing import Reading
from .call_form import object_form
from .json_calls import JsonCallStage, KnownObjectCall, ObjectCall
from .stage import ToolCallStage

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
