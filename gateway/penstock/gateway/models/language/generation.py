"""One call's generation: from engine outputs to deltas of text, for each of its choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import RequestOutput
from penstock.engines.errors import EngineError, PenstockError
from penstock.gateway.models.language.choice_output import (
    ChoiceDelta,
    ChoiceOutput,
    StagedChoiceOutput,
    TokenLogprob,
    with_text,
)
from penstock.gateway.models.language.generate_request import GenerateRequest
from penstock.gateway.models.language.model_metrics import ModelMetrics
from penstock.gateway.requests.record import Outcome, Stage, outcome_of
from penstock.tokenizers import StopStrings, Tokenizer


class AcceptedCall(Protocol):
    """A request, from its acceptance by the target that serves it."""

    watched: bool
    """Whether `took` is to be called."""

    def took(self, deltas: list[ChoiceDelta]) -> None:
        """Its generation has given these out. The list may change afterwards."""

    def responded(self) -> None:
        """There is a first token. Idempotent."""

    def end(self, outcome: Outcome) -> None:
        """Idempotent."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    """Of `completion_tokens`. Stages find them, so without stages there are none."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class DeltaListener(Protocol):
    """Called on the event loop."""

    def take(self, deltas: list[ChoiceDelta]) -> None:
        """What the iterator would have given. An error that this raises is given to `fail`."""
        ...

    def fail(self, error: Exception) -> None:
        """The last call: what the iterator would have raised."""
        ...


class Generation:
    """The choices of one call: an async iterator of lists of ChoiceDelta, at most one for each choice. A list is empty
    only where `GenerateRequest.pulse` asks for that.

    Iterating raises the PenstockError that ended a choice, if one did. `close()` (idempotent; also at the end of
    `async with`) aborts whatever still runs.
    """

    def __init__(
        self,
        stream: RequestStream,
        tokenizer: Tokenizer,
        request: GenerateRequest,
        prompts: list[list[int]],
        ids: list[tuple[int, ...]],
        metrics: ModelMetrics,
        abort: Callable[[Sequence[int]], None],
        on_end: Callable[[], None],
        admitted: Callable[[], bool],
        call: AcceptedCall | None = None,
    ) -> None:
        """`ids`: the engine's, for each prompt; one where all its choices are the same. `on_end` is called once, when
        the last choice ends. `admitted`: whether the engine has taken all of it in. `call`: counts it for a name that
        several models serve."""
        self.prompt_token_ids = prompts
        """The prompts as token ids."""
        self.has_images = bool(request.images)
        self.prompt_logprobs: list[list[TokenLogprob | None]] | None = (
            None if request.params.prompt_logprobs is None else [[None] for _ in prompts]
        )
        """For each prompt, when asked for: None for its first token, then one for each other. Known with the first
        delta of that prompt."""
        self.usage = Usage(prompt_tokens=sum(map(len, prompts)))
        """Counts up while the generation is consumed. prompt_tokens counts each prompt once, whatever n is."""
        self._record = request.context.record
        self._record.usage = self.usage
        self._stream = stream
        self._tokenizer = tokenizer
        self._n = request.n
        self._copies = request.n // len(ids[0])
        """How many choices each of the engine's samples is."""
        self._tokens_of = [0] * (len(prompts) * len(ids[0]))
        """By sample."""
        self._metrics = metrics
        self._abort = abort
        self._arrival = request.context.arrival
        self._on_end = on_end
        self._admitted = admitted
        self._call = call
        self._grammar_field = request.grammar_field
        self._pulse = request.pulse
        self._last_shown_at = time.monotonic()
        """When deltas were last handed out; before the first, when the request was handed in."""
        self._timer: asyncio.TimerHandle | None = None
        self._ready: list[ChoiceDelta] | None = None
        self._listener: DeltaListener | None = None
        choice = StagedChoiceOutput if request.stages else ChoiceOutput
        stops = StopStrings(request.stop, request.include_stop_str_in_output) if request.stop else None
        self._choices = {
            request_id: choice(
                prompt * request.n + sample,
                tokenizer,
                request,
                prompts[prompt],
                None if stops is None else stops.unused(),
            )
            for prompt, samples in enumerate(ids)
            for sample, request_id in enumerate(samples)
        }

    @property
    def queue_seconds(self) -> float:
        """How long the first prompt waited; known with its first delta."""
        return self._record.queue_seconds

    def tokens_of(self, choice: int) -> int:
        """Completion tokens of a choice so far."""
        return self._tokens_of[choice // self._copies]

    def prompt_text(self, prompt: int) -> str:
        """The text of a prompt that was given as token ids."""
        return self._tokenizer.decode(self.prompt_token_ids[prompt], skip_special_tokens=False)

    def first_token(self, prompt: int) -> tuple[str, bytes]:
        """(printable form, bytes) of a prompt's first token, which `prompt_logprobs` has no entry for."""
        token_id = self.prompt_token_ids[prompt][0]
        return self._tokenizer.token_text(token_id), self._tokenizer.token_bytes(token_id)

    async def begin(self) -> Generation:
        """Waits for the first output, or the first pulse, so that refusals are raised before any response has begun."""
        if self._pulse is not None:
            self._timer = asyncio.get_running_loop().call_later(self._pulse, self._check_pulse, self._pulse)
        try:
            self._ready = await self._next()
        except StopAsyncIteration:
            self._end_all("error:engine_error", Outcome.SERVER_ERROR)
            raise EngineError("The engine answered nothing.") from None
        return self

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        return await self._next()

    def _check_pulse(self, pulse: float) -> None:
        rest = self._last_shown_at + pulse - time.monotonic()
        if rest <= 0:
            rest = pulse
            if self._admitted():
                self._stream.nudge()
        self._timer = asyncio.get_running_loop().call_later(rest, self._check_pulse, pulse)

    async def _next(self) -> list[ChoiceDelta]:
        while True:
            outputs = await self._stream.__anext__()
            deltas = self._deltas(outputs)
            if deltas or not outputs:
                return deltas

    def listen(self, listener: DeltaListener | None) -> None:
        """An alternative to iterating: `listener` gets the deltas as they come. So no task, nor what awaits it, has to
        be resumed for each token of each stream. None ends that: what comes then is merged, and waits."""
        self._listener = listener
        self._stream.listen(None if listener is None else self._push_deltas)

    def _push_deltas(self) -> None:
        listener, outputs = self._listener, self._stream.take()
        if listener is None:
            return
        try:
            deltas = self._deltas(outputs)
            if deltas or not outputs:
                listener.take(deltas)
        except Exception as error:
            self.listen(None)
            listener.fail(error)

    def _deltas(self, outputs: Sequence[RequestOutput]) -> list[ChoiceDelta]:
        """Empty where there is nothing to show. Raises the PenstockError that ended a choice."""
        deltas: list[ChoiceDelta] = []
        now = time.monotonic()
        try:
            for output in outputs:
                delta = self._advance(output, now)
                if delta is not None:
                    deltas.append(delta)
        except PenstockError as error:
            self._end_all(f"error:{error.code}", outcome_of(error))
            raise
        if self._copies > 1:
            deltas = [delta.copy_for(delta.index + copy) for delta in deltas for copy in range(self._copies)]
        if deltas:
            self._last_shown_at = now
            if self._call is not None:
                self._tell_routing(self._call, deltas)
        return deltas

    def _tell_routing(self, call: AcceptedCall, deltas: list[ChoiceDelta]) -> None:
        call.responded()
        if call.watched:
            call.took(deltas)
        if not self._choices:
            call.end(Outcome.OK)

    def _advance(self, output: RequestOutput, now: float) -> ChoiceDelta | None:
        """The choice's delta; None while there is nothing to show, since the text so far ends with half a character, or
        with what may become a stop string or a tag."""
        choice = self._choices.get(output.id)
        if choice is None:
            return None
        if output.error is not None:
            raise output.error.raised(self._grammar_field)
        if output.prompt is not None:
            self._prompt_done(choice, output)
        if output.guessed is not None:
            right, wrong = output.guessed
            self.usage.accepted_prediction_tokens += self._copies * (right - choice.guessed[0])
            self.usage.rejected_prediction_tokens += self._copies * (wrong - choice.guessed[1])
            choice.guessed = output.guessed
        delta = choice.advance(output, self._tokenizer)
        count, copies = len(delta.token_ids), self._copies
        self.usage.completion_tokens += copies * count
        self.usage.reasoning_tokens += copies * delta.reasoning_tokens
        self._tokens_of[choice.index // copies] += count
        if choice.held_token_ids or delta.logprobs is not None:
            choice.rejoin(delta)
        if count:
            if self._record.first_token_at is None:
                self._record.first_token_at = now
                self._record.enter(Stage.DECODING)
            self._metrics.tokens(count, choice.last_token_at, now, self._arrival, copies)
            choice.last_token_at = now
        if delta.finish_reason is not None:
            del self._choices[output.id]
            self._record.finish_reasons += (delta.finish_reason,) * copies
            self._metrics.finished(delta.finish_reason, now - self._arrival, copies)
            if output.finish_reason is None:  # a stop string, of which the engine does not know
                self._abort([output.id])
            if not self._choices:
                self._on_end()
        elif not delta.text and not delta.parts and not delta.logprobs:
            choice.held_token_ids += delta.token_ids
            return None
        return delta

    def _prompt_done(self, choice: ChoiceOutput, output: RequestOutput) -> None:
        prompt = output.prompt
        if prompt is None or choice.index % self._n:
            return
        self.usage.cached_tokens += prompt.num_cached_tokens
        self._metrics.queued(prompt.queue_seconds)
        self._record.queue_seconds = self._record.queue_seconds or prompt.queue_seconds
        if prompt.chunks is not None:
            self._record.computed((chunk.scheduled, chunk.done, chunk.num_tokens) for chunk in prompt.chunks)
        if self.prompt_logprobs is not None and prompt.logprobs is not None:
            converted = [with_text(entry, self._tokenizer) for entry in prompt.logprobs]
            self.prompt_logprobs[choice.index // self._n].extend(converted)

    def _end_all(self, reason: str, outcome: Outcome) -> None:
        if self._call is not None:
            self._call.end(outcome)
        elapsed = time.monotonic() - self._arrival
        if self._choices:
            self._metrics.finished(reason, elapsed, len(self._choices) * self._copies)
            self._choices.clear()
            self._on_end()
        if self._timer is not None:
            self._timer.cancel()
        self._stream.close()

    def close(self) -> None:
        """Aborts whatever still runs; its blocks are free before the engine's next step."""
        self._end_all("abort", Outcome.CANCELLED)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
