"""One choice's tokens as deltas: detokenizer, stages, stop strings, log probabilities."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.engines.contract.messages import FinishReason, RequestOutput, TokenLogprobs
from penstock.gateway.models.language.generate_request import GenerateRequest
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token with its logprob, as text."""

    token: str
    token_id: int
    logprob: float
    bytes: list[int]
    """The token's UTF-8 bytes, which may be a part of a character."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(Candidate):
    top: list[Candidate]
    """The likeliest tokens at this position, best first; as many as were asked for."""
    rank: int = 0
    """1 for the likeliest token of the vocabulary."""
    offset: int = 0
    """Where its text begins in the answer's text, in characters; negative in the prompt, where that stands before the
    answer. A token that continues a character begins where the character does."""


class TextOffsets:
    """Where the texts of an answer's tokens begin in its text."""

    def __init__(self, tokenizer: Tokenizer, is_silent: Callable[[int], bool]) -> None:
        """`is_silent`: whether a token, such as a skipped special one, is not in the text."""
        self._tokenizer = tokenizer
        self._is_silent = is_silent
        self._held = b""
        """Of the tokens whose text is not final."""
        self.end = 0
        """Where the final text ends."""

    def take(self, token_id: int, text: str) -> int:
        """Where the next token's text begins. `text`: what is final since it came."""
        start = self.end + len(whole_characters(self._held))
        data = b"" if self._is_silent(token_id) else self._tokenizer.token_bytes(token_id)
        if not text:
            self._held += data
            return start
        self.end += len(text)
        self._held = b""
        own = whole_characters(data)
        # Where a run of bytes was no text, or a mark was stripped, the bytes do not tell how long their text is.
        return self.end - len(own) if own.encode() == data and text.endswith(own) else start


def whole_characters(data: bytes) -> str:
    """The text of UTF-8 without the part of a character at its end."""
    return codecs.utf_8_decode(data, "replace", False)[0]


def with_text(entry: TokenLogprobs, tokenizer: Tokenizer, offset: int = 0) -> TokenLogprob:
    def candidate(token_id: int, logprob: float) -> Candidate:
        data = tokenizer.token_bytes(token_id)
        return Candidate(tokenizer.token_text(token_id), token_id, logprob, list(data))

    own = candidate(entry.token_id, entry.logprob)
    top = [candidate(token_id, logprob) for token_id, logprob in entry.top]
    return TokenLogprob(own.token, own.token_id, own.logprob, own.bytes, top, entry.rank, offset)


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

    def copy_for(self, index: int) -> ChoiceDelta:
        """The same of another choice. Readers may append to its lists."""
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return replace(self, index=index, token_ids=list(self.token_ids), logprobs=logprobs)


class ChoiceOutput:
    """One choice's detokenizer and stop strings. What the detokenizer gives is the answer's text."""

    __slots__ = (
        "_detokenizer",
        "_held_logprobs",
        "_include_stop",
        "_offsets",
        "_shown",
        "_stops",
        "_too_early",
        "guessed",
        "held_token_ids",
        "index",
        "last_token_at",
    )

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        request: GenerateRequest,
        prompt: list[int],
        stops: StopStrings | None,
    ) -> None:
        """`stops`: the request's, for this choice alone; None where it has none."""
        self.index = index
        self.last_token_at: float | None = None
        """Of time.monotonic()."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.skip_special_tokens, prompt, request.shown_tokens)
        self._include_stop = request.include_stop_str_in_output
        self._stops: StopStrings | _StopsInText | None = stops
        self._too_early = request.params.min_tokens
        """Tokens still to come whose text is not searched for stop strings, as in vLLM."""
        self.guessed = (0, 0)
        """`RequestOutput.guessed` of the newest output."""
        self.held_token_ids: list[int] = []
        """Token ids that have no text to show yet: half a character, or a possible stop string."""
        self._held_logprobs: list[TokenLogprob] = []
        """Those of `held_token_ids`, where they are wanted."""
        self._shown = 0
        """Characters that have gone out, those of all stages included."""
        self._offsets: TextOffsets | None = None
        if request.params.logprobs is not None:
            skips, shown = request.skip_special_tokens, request.shown_tokens
            self._offsets = TextOffsets(tokenizer, lambda i: tokenizer.is_silent(i, skips and i not in shown))

    def advance(self, output: RequestOutput, tokenizer: Tokenizer) -> ChoiceDelta:
        delta = ChoiceDelta(self.index, "", output.token_ids)
        if self._stops is None and self._offsets is None and output.logprobs is None:
            delta.text = self._detokenizer.push(self._visible(output))
            if output.finish_reason is not None:
                self._finish(output, delta)
            return delta
        starts = self._advance_by_token(output, delta)
        if output.finish_reason is not None and delta.finish_reason is None:
            self._finish(output, delta)
        if output.logprobs is not None:
            starts += [self._offsets.end if self._offsets else 0] * (len(delta.token_ids) - len(starts))
            delta.logprobs = [
                with_text(entry, tokenizer, start) for entry, start in zip(output.logprobs, starts, strict=False)
            ]
        self._shown += len(delta.text)
        return delta

    def rejoin(self, delta: ChoiceDelta) -> None:
        """Adds what was held to a delta. With logprobs, tokens whose text begins behind all that has gone out are held:
        while a stop string may still cut it off, it has no place."""
        delta.token_ids, self.held_token_ids = self.held_token_ids + delta.token_ids, []
        if self._offsets is None:
            return
        known, self._held_logprobs = self._held_logprobs + (delta.logprobs or []), []
        place = bisect_right(known, self._shown, key=lambda entry: entry.offset)
        if delta.finish_reason is not None:
            known[place:] = [replace(entry, offset=self._shown) for entry in known[place:]]
        elif place < len(known):
            self.held_token_ids, delta.token_ids = delta.token_ids[place:], delta.token_ids[:place]
            self._held_logprobs, known = known[place:], known[:place]
        delta.logprobs = known

    def _visible(self, output: RequestOutput) -> list[int]:
        """The tokens without the one that ended the request: EOS and stop tokens are not part of the answer."""
        stopped = output.finish_reason is FinishReason.STOP and not self._include_stop
        return output.token_ids[:-1] if stopped else output.token_ids

    def _advance_by_token(self, output: RequestOutput, delta: ChoiceDelta) -> list[int]:
        """Token by token: those behind a stop string are not counted, even if they arrived together with it. Gives
        where their texts begin, if that is wanted."""
        texts, starts = [], []
        for taken, token_id in enumerate(self._visible(output), 1):
            text, matched = self._detokenizer.push((token_id,)), None
            if self._offsets is not None:
                starts.append(self._offsets.take(token_id, text))
            if self._too_early:
                self._too_early -= 1
            elif self._stops is not None:
                text, matched = self._stops.push(text)
            texts.append(text)
            if matched is not None:
                delta.token_ids = output.token_ids[:taken]
                delta.finish_reason, delta.stop_reason = "stop", matched
                break
        delta.text = "".join(texts)
        return starts

    def _finish(self, output: RequestOutput, delta: ChoiceDelta) -> None:
        rest = self._detokenizer.flush()
        if self._offsets is not None:
            self._offsets.end += len(rest)
        if self._stops is not None:
            text, matched = self._stops.push(rest)
            rest = text if matched is not None else text + self._stops.flush()
            delta.stop_reason = self._stops.matched
        delta.text += rest
        delta.finish_reason = "stop" if delta.stop_reason is not None else str(output.finish_reason)
        if delta.stop_reason is None:
            delta.stop_reason = output.stop_token_id


class _StopsInText:
    """Stages, and stop strings behind them: in place of a `StopStrings` it takes what the detokenizer gives, token by
    token. Other parts end a text: a stop string is found only where all of it lies in one piece between them."""

    def __init__(self, stages: StageChain, stops: StopStrings, too_early: int) -> None:
        """`too_early`: so many tokens still to come are not searched. What the stages hold back of them is, once it
        turns out to be text."""
        self._stages = stages
        self._stops = stops
        self._too_early = too_early
        self._parts: list[Part] = []

    @property
    def matched(self) -> str | None:
        return self._stops.matched

    def push(self, text: str) -> tuple[str, str | None]:
        """The text of the next token as it is, whatever it is part of."""
        parts = self._stages.push(text) if text else ()
        if self._too_early:
            self._too_early -= 1
            self._parts += parts
        else:
            self._search(parts)
        return text, self.matched

    def flush(self) -> str:
        self._search(self._stages.flush())
        self._add_text(self._stops.flush())
        return ""

    def take(self) -> list[Part]:
        """The parts that are new, up to a stop string."""
        parts, self._parts = self._parts, []
        return parts

    def _search(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, TextPart):
                self._add_text(self._stops.push(part.text)[0])
            else:
                self._add_text(self._stops.flush())
                if self.matched is None:
                    self._parts.append(part)

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))


class StagedChoiceOutput(ChoiceOutput):
    """With stages, and stop strings behind them. A class of its own, so that plain text does not pay for them."""

    __slots__ = ("_searched", "_show_reasoning", "_stages", "_uncounted")

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        request: GenerateRequest,
        prompt: list[int],
        stops: StopStrings | None,
    ) -> None:
        super().__init__(index, tokenizer, request, prompt, stops)
        self._stages = StageChain(request.stages)
        self._searched = None if stops is None else _StopsInText(self._stages, stops, self._too_early)
        if self._searched is not None:
            self._stops, self._too_early = self._searched, 0
        self._show_reasoning = request.show_reasoning
        self._uncounted = 0
        """New tokens whose text no part has shown yet."""

    def advance(self, output: RequestOutput, tokenizer: Tokenizer) -> ChoiceDelta:
        delta = super().advance(output, tokenizer)
        if self._searched is not None:
            parts = self._searched.take()
        else:
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
