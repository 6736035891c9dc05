"""The channels of gpt-oss."""

from __future__ import annotations

from ..parsing import ParserStage, Reading, Tags
from ..parsing.harmony import CLOSINGS, CONTENT_END, MARKERS, OPENINGS, START, read_header
from .answer_frame import AnswerFrame, ThoughtTags

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
