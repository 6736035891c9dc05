"""From one choice's tokens to its deltas: detokenizer, stop strings, stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engines.contract.messages import FinishReason, RequestOutput
from penstock.gateway.llm.generate_request import GenerateRequest
from penstock.gateway.llm.token_logprobs import TokenLogprob, with_text
from penstock.tokenizers import (
    IncrementalDetokenizer,
    Part,
    ReasoningPart,
    StageChain,
    StopStrings,
    TextPart,
    Tokenizer,
    ToolCallPart,
)


@dataclass(slots=True)
class ChoiceDelta:
    """What is new of one choice since its last delta."""

    index: int
    """prompt number * n + sample number."""
    text: str
    """New text of the answer."""
    token_ids: list[int]
    finish_reason: str | None = None
    """"stop" or "length", in the choice's last delta."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for EOS."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of token_ids, when asked for."""
    parts: Sequence[Part] | None = None
    """What the stages have found, in order, the text included; None where the request names no stages."""
    reasoning_tokens: int = 0
    """How many of the choice's new tokens are reasoning."""


class ChoiceOutput:
    """One choice's detokenizer and stop strings."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_stops",
        "_too_early",
        "guessed",
        "held_token_ids",
        "index",
        "last_token_at",
    )

    def __init__(self, index: int, tokenizer: Tokenizer, request: GenerateRequest, prompt: list[int]) -> None:
        self.index = index
        self.last_token_at: float | None = None
        """Of time.monotonic()."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.skip_special_tokens, prompt, request.shown_tokens)
        self._include_stop = request.include_stop_str_in_output
        self._stops = StopStrings(request.stop, self._include_stop) if request.stop else None
        self._too_early = request.params.min_tokens
        """Tokens still to come whose text is not searched for stop strings, as in vLLM."""
        self.guessed = (0, 0)
        """`RequestOutput.guessed` of the newest output."""
        self.held_token_ids: list[int] = []
        """Token ids that have no text to show yet: half a character, or a possible stop string."""

    def advance(self, output: RequestOutput, tokenizer: Tokenizer) -> ChoiceDelta:
        delta = ChoiceDelta(self.index, "", output.token_ids)
        if self._stops is None:
            delta.text = self._detokenizer.push(self._visible(output))
        else:
            self._advance_to_stop(self._stops, output, delta)
        if output.finish_reason is not None and delta.finish_reason is None:
            self._finish(output, delta)
        if output.logprobs is not None:
            delta.logprobs = [with_text(entry, tokenizer) for entry in output.logprobs[: len(delta.token_ids)]]
        return delta

    def _visible(self, output: RequestOutput) -> list[int]:
        """The tokens without the one that ended the request: EOS and stop tokens are not part of the answer."""
        stopped = output.finish_reason is FinishReason.STOP and not self._include_stop
        return output.token_ids[:-1] if stopped else output.token_ids

    def _advance_to_stop(self, stops: StopStrings, output: RequestOutput, delta: ChoiceDelta) -> None:
        """Token by token: those behind a stop string are not counted, even if they arrived together with it."""
        texts = []
        for taken, token_id in enumerate(self._visible(output), 1):
            text, matched = self._detokenizer.push((token_id,)), None
            if self._too_early:
                self._too_early -= 1
            else:
                text, matched = stops.push(text)
            texts.append(text)
            if matched is not None:
                delta.token_ids = output.token_ids[:taken]
                delta.finish_reason, delta.stop_reason = "stop", matched
                break
        delta.text = "".join(texts)

    def _finish(self, output: RequestOutput, delta: ChoiceDelta) -> None:
        rest = self._detokenizer.flush()
        if self._stops is not None:
            text, matched = self._stops.push(rest)
            rest = text if matched is not None else text + self._stops.flush()
            delta.stop_reason = self._stops.matched
        delta.text += rest
        delta.finish_reason = "stop" if delta.stop_reason is not None else str(output.finish_reason)
        if delta.stop_reason is None:
            delta.stop_reason = output.stop_token_id


class StagedChoiceOutput(ChoiceOutput):
    """With stages behind the stop strings. A class of its own, so that plain text does not pay for them."""

    __slots__ = ("_show_reasoning", "_stages", "_uncounted")

    def __init__(self, index: int, tokenizer: Tokenizer, request: GenerateRequest, prompt: list[int]) -> None:
        super().__init__(index, tokenizer, request, prompt)
        self._stages = StageChain(request.stages)
        self._show_reasoning = request.show_reasoning
        self._uncounted = 0
        """New tokens whose text no part has shown yet."""

    def advance(self, output: RequestOutput, tokenizer: Tokenizer) -> ChoiceDelta:
        delta = super().advance(output, tokenizer)
        parts = [*self._stages.push(delta.text)] if delta.text else []
        if delta.finish_reason is not None:
            parts += self._stages.flush()
        self._count(delta, parts)
        delta.text = "".join([part.text for part in parts if isinstance(part, TextPart)])
        delta.parts = parts if self._show_reasoning else [part for part in parts if not isinstance(part, ReasoningPart)]
        return delta

    def _count(self, delta: ChoiceDelta, parts: Sequence[Part]) -> None:
        """Text does not tell which token it came from: where reasoning comes with other parts, it counts for as many of
        the tokens as its share of the characters."""
        self._uncounted += len(delta.token_ids)
        if not parts:
            return
        thought = sum([len(part.text) for part in parts if isinstance(part, ReasoningPart)])
        if thought:
            total = sum([len(part.arguments if isinstance(part, ToolCallPart) else part.text) for part in parts])
            delta.reasoning_tokens = round(self._uncounted * thought / total)
        self._uncounted = 0
