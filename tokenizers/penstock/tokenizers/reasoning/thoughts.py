"""Thoughts between two tags, or two phrases."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from ..parsing import ParserStage, Reading, Tags
from ..parsing.harmony import CLOSINGS, CONTENT_END, MARKERS, OPENINGS, START, read_header
from ..parsing.reader import SPACE


class ThoughtTags(NamedTuple):
    """What tells a model's thoughts from its answer. The tags are texts; each may be a special token."""

    openings: tuple[str, ...]
    """Any of these begins a thought."""
    endings: tuple[str, ...]
    """Any of these ends it."""
    closing: str
    """What a model that has thought enough writes."""
    inside: bool = False
    """The output begins inside of a thought."""
    again: bool = False
    """A thought may begin anywhere, also behind another one; else at the beginning of the output only."""


class AnswerFrame(NamedTuple):
    """What stands before an answer in a model's output."""

    thought: tuple[str, str] | None = None
    """What begins and ends a thought, which may be left out. Nothing begins it: the output begins inside of it."""
    preface: str = ""
    """What stands right before the answer."""
    tags: ThoughtTags | None = None
    """None: those of `thought`, and nothing else."""

    @property
    def thought_tags(self) -> ThoughtTags | None:
        """None: there is no thought."""
        if self.tags is not None or self.thought is None:
            return self.tags
        begin, end = self.thought
        return ThoughtTags((begin,) if begin else (), (end,), end, inside=not begin)


class ThoughtStage(ParserStage):
    """One thought at the start of the answer. White space right behind its tags belongs to the format and is dropped.

    The prompt decides where a template writes tags itself: behind an opening the answer begins inside of the thought,
    and behind a closing nothing is a thought.
    """

    openings: ClassVar[tuple[str, ...]]
    closings: ClassVar[tuple[str, ...]]
    inside: ClassVar[bool] = False
    """Whether the answer begins inside of the thought if the prompt does not tell."""
    anywhere: ClassVar[bool] = False
    """Whether a thought may also stand behind text, or behind another thought."""
    calls: ClassVar[tuple[str, ...]] = ()
    """What begins a tool call. It ends a thought as well, because models forget the closing; it stays in the text."""
    _opening_tags: ClassVar[Tags]
    _closing_tags: ClassVar[Tags]
    _end_tags: ClassVar[Tags]

    def __init__(self, prompt_end: str = "") -> None:
        super().__init__()
        tail = prompt_end.rstrip()
        self._inside = tail.endswith(self.openings) or (self.inside and not tail.endswith(self.closings))
        self._over = tail.endswith(self.closings) and not self.anywhere

    @classmethod
    def frame(cls, prompt_end: str) -> AnswerFrame:
        """What may stand before an answer to a prompt that ends like this."""
        stage = cls(prompt_end)
        if stage._over:
            return AnswerFrame()
        closing = cls.closings[0]
        tags = ThoughtTags(cls.openings, (*cls.closings, *cls.calls), closing, inside=stage._inside, again=cls.anywhere)
        return AnswerFrame(thought=("" if stage._inside else cls.openings[0], closing), tags=tags)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "markers" not in vars(cls):
            cls.markers = (*cls.openings, *cls.closings)
        cls._opening_tags = Tags(*cls.openings)
        cls._closing_tags = Tags(*cls.closings)
        cls._end_tags = Tags(*cls.closings, *cls.calls)

    def parse(self) -> Reading[None]:
        if not self._over:
            yield from self.reader.run(SPACE, self.reasoning if self._inside else self.text)
            opening = yield from self.reader.one_of(self._opening_tags)
            if opening or self._inside:
                yield from self._read_thought(opening)
        while self.anywhere:
            opening = yield from self.reader.until(self._opening_tags, self.text)
            if opening is None:
                return
            yield from self._read_thought(opening)
        yield from self.reader.everything(self.text)

    def _read_thought(self, opening: str | None) -> Reading[None]:
        if opening:
            yield from self.reader.skip_space()
        yield from self.reader.before(self._end_tags, self.reasoning)
        if (yield from self.reader.one_of(self._closing_tags)):
            yield from self.reader.skip_space()


class ThinkStage(ThoughtStage):
    """`<think>...</think>`, anywhere and any number of times: for models that have no parser of their own here."""

    openings = ("<think>",)
    closings = ("</think>",)
    anywhere = True


class DeepSeekR1Stage(ThoughtStage):
    """DeepSeek R1, V3.1, QwQ: the template has written `<think>`, or the model does.

    The format is that of the models' chat templates. That of V3.1 ends with `</think>` where the model is not to think.
    """

    openings = ("<think>",)
    closings = ("</think>",)
    inside = True
    calls = ("<｜tool▁calls▁begin｜>",)


class Qwen3Stage(ThoughtStage):
    """Qwen 3: `<think>...</think>`, which is absent with `enable_thinking` off. The templates of the thinking models
    have written `<think>`.

    The format is that of the models' chat templates.
    """

    openings = ("<think>",)
    closings = ("</think>",)
    calls = ("<tool_call>",)


class Glm45ThoughtStage(Qwen3Stage):
    """GLM 4.5 to 4.7: as Qwen 3. Where the model is not to think, the template ends with `</think>`.

    The format is that of the models' chat templates.
    """


class KimiK2ThoughtStage(ThoughtStage):
    """Kimi K2 Thinking: as Qwen 3, with calls of its own.

    The format is that of the model's chat template and of its guide to deployment.
    """

    openings = ("<think>",)
    closings = ("</think>",)
    calls = ("<|tool_calls_section_begin|>",)


class MiniMaxStage(ThoughtStage):
    """MiniMax M2: the template has written `<think>`, and the model writes `</think>`.

    The format is that of the model's chat template.
    """

    openings = ("<think>",)
    closings = ("</think>",)
    inside = True
    calls = ("<minimax:tool_call>",)


class MistralThoughtStage(ThoughtStage):
    """Magistral and later models of Mistral: `[THINK]...[/THINK]`.

    The format is that of mistral-common, from version 13 of the tokenizer on.
    """

    openings = ("[THINK]",)
    closings = ("[/THINK]",)
    calls = ("[TOOL_CALLS]",)


class Gemma4Stage(ThoughtStage):
    """Gemma 4: `<|channel>thought...<channel|>`.

    The format is that of the models' chat templates.
    """

    openings = ("<|channel>thought",)
    closings = ("<channel|>",)
    calls = ("<|tool_call>",)
    markers = ("<|channel>", "<channel|>")


class GraniteThoughtStage(ThoughtStage):
    """IBM Granite 3.2 and 3.3: phrases instead of tags.

    The format is that of the prompt in the models' chat templates. Quantized models shorten "Here is".
    """

    openings = ("Here is my thought process:", "Here's my thought process:")
    closings = ("Here is my response:", "Here's my response:")


_OPENINGS = Tags(*OPENINGS)
_CLOSINGS = Tags(*CLOSINGS)


class GptOssReasoningStage(ParserStage):
    """gpt-oss: messages on the channel `analysis` are reasoning, those on `final` and `commentary` the answer. Messages
    to a function stay as they are, with their tokens: the tool parser of the same name finds them behind this one.

    The format is OpenAI's harmony response format.
    """

    markers = MARKERS

    def __init__(self, prompt_end: str = "") -> None:
        """The prompt ends with `<|start|>assistant` in any case."""
        super().__init__()

    @classmethod
    def frame(cls, prompt_end: str) -> AnswerFrame:
        opening, closing = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        tags = ThoughtTags((opening,), (*OPENINGS, *CLOSINGS), closing, again=True)
        return AnswerFrame((opening, closing), "<|channel|>final<|message|>", tags)

    def parse(self) -> Reading[None]:
        opening = yield from self.reader.one_of(START)
        while True:
            opening = opening or (yield from self.reader.until(_OPENINGS, self.text))
            if opening is None:
                return
            yield from self._read_message(opening)
            opening = None

    def _read_message(self, opening: str) -> Reading[None]:
        self.reader.record(opening)
        header = yield from read_header(self.reader, opening)
        written = self.reader.recorded()
        if header is None or header.recipient:
            self.text(written)
            return
        yield from self.reader.before(CONTENT_END, self.reasoning if header.channel == "analysis" else self.text)
        yield from self.reader.one_of(_CLOSINGS)
