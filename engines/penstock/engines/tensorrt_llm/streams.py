"""Requests that TensorRT-LLM holds, one task for each. All of this runs on one event loop."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.executor.utils import RequestError

from penstock.engines.autonomous.output_pipe import OutputPipe
from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens, StartRequest
from penstock.engines.contract.messages import FinishReason, TokenLogprobs
from penstock.engines.errors import EngineDeadError, EngineError, InvalidRequestError, NumericalError, PenstockError
from penstock.engines.tensorrt_llm.contract import IterationSample, read_stats
from penstock.engines.tensorrt_llm.watchdog import Watchdog

logger = logging.getLogger(__name__)

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class OutputReader:
    """One request's."""

    def __init__(self, request: StartRequest, stops: Sequence[int], eos_token_ids: Sequence[int]) -> None:
        """`stops`: the tokens that end it, `end_id` first."""
        self._id = request.id
        self._stops = stops
        self._named_stops = frozenset(request.params.stop_token_ids) - frozenset(eos_token_ids)
        self._top = request.params.logprobs
        self._num_read = 0
        self.has_ended = False

    @property
    def has_begun(self) -> bool:
        return self._num_read > 0

    def read(self, result: Any) -> NewTokens | None:
        """None when nothing is new. Raises EngineError for an answer that cannot be passed on."""
        output = result.outputs[0]
        start, tokens = self._num_read, [int(token) for token in output.token_ids[self._num_read :]]
        reason = self._reason(result, output)
        if not tokens and reason is None:
            return None
        self._num_read += len(tokens)
        self.has_ended = reason is not None
        new = NewTokens(self._id, tokens, reason)
        if reason is FinishReason.STOP:
            if not (tokens and tokens[-1] in self._stops):  # TRTLLMSampler keeps the end_id to itself
                tokens.append(self._stops[0])
            new.stop_token_id = tokens[-1] if tokens[-1] in self._named_stops else None
        if self._top is not None:
            rows = output.logprobs[start : start + len(tokens)]
            if len(rows) != len(tokens):
                raise EngineError(f"TensorRT-LLM returned {len(rows)} logprobs for {len(tokens)} tokens")
            new.logprobs = [_entry(token, row, self._top) for token, row in zip(tokens, rows, strict=True)]
        if not start:
            new.num_cached_tokens = result.cached_tokens
        return new

    def _reason(self, result: Any, output: Any) -> FinishReason | None:
        if not result.finished:
            return None
        reason = _REASONS.get(output.finish_reason)
        if reason is None:
            raise EngineError(f"TensorRT-LLM ended a request by itself: {output.finish_reason}")
        return reason


def _entry(token: int, row: Any, top: int) -> TokenLogprobs:
    """`row`: token id -> its Logprob; the sampled one among them, more or fewer of the others than were asked for."""
    own = row.get(token) if isinstance(row, dict) else None
    if own is None:
        raise EngineError("TensorRT-LLM returned no logprob of the token that it sampled")
    if not math.isfinite(own.logprob):
        raise NumericalError("the model's logits are not finite")
    likeliest = sorted(((i, p.logprob) for i, p in row.items()), key=lambda entry: -entry[1])
    rank = own.rank or 1 + sum(p > own.logprob for _, p in likeliest)
    return TokenLogprobs(token, own.logprob, rank, likeliest[:top])


@dataclass
class TrtllmRequest:
    """A request as TensorRT-LLM takes it."""

    id: int
    arguments: dict[str, Any]
    """Of `LLM.generate_async`."""
    reader: OutputReader
    num_prompt_blocks: int


@dataclass
class _Stream:
    order: TrtllmRequest
    output: Any
    """TensorRT-LLM's RequestOutput."""
    is_silent: bool = False
    """Nobody wants its tokens any more."""
    task: asyncio.Task[None] = field(init=False)


class Streams:
    def __init__(self, llm: Any, pipe: OutputPipe, watchdog: Watchdog, probe: dict[str, Any], interval: float) -> None:
        """`probe`: arguments of `generate_async` for a request of one token. `interval`: seconds between two looks at
        the watchdog, and the longest wait for statistics."""
        self._llm = llm
        self._pipe = pipe
        self._watchdog = watchdog
        self._probe_arguments = probe
        self._interval = interval
        self._streams: dict[int, _Stream] = {}
        self._pending = BatcherOutput()
        self._flushing = False
        self._busy = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_free_blocks = 0
        """By the newest statistics, less what prompts have taken since."""

    async def first_sample(self, patience: float) -> IterationSample:
        """Runs a request of one token: TensorRT-LLM tells of its KV cache only when it has worked.

        Raises EngineError after `patience` seconds.
        """
        try:
            async with asyncio.timeout(patience):
                async for _ in self._llm.generate_async(**self._probe_arguments):
                    pass
                while True:
                    async for stats in self._statistics():
                        return read_stats(stats)
        except TimeoutError:
            raise EngineError(f"TensorRT-LLM did not answer a first request within {patience:.0f} s") from None

    def watch(self) -> None:
        """Starts what goes on beside the requests."""
        self._spawn(self._listen())
        self._spawn(self._look_after())

    def begin(self, order: TrtllmRequest) -> None:
        try:
            output = self._llm.generate_async(**order.arguments)
        except ValueError as error:
            self._emit(_failed(order.id, InvalidRequestError(f"TensorRT-LLM refuses the request: {error}")))
        except RequestError:
            self._emit(_failed(order.id, _request_failed()))
        except Exception as error:
            self._die(error)
        else:
            stream = self._streams[order.id] = _Stream(order, output)
            self._watchdog.started(order.id)
            self._busy.set()
            stream.task = self._spawn(self._follow(stream))

    def abort(self, request_id: int) -> None:
        """Ids that are not running are ignored: their end is on its way."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.is_silent:
            stream.is_silent = True
            self._watchdog.aborted(request_id)
            stream.output.abort()

    # -- one request -----------------------------------------------------------------------------------------

    async def _follow(self, stream: _Stream) -> None:
        try:
            async for result in stream.output:
                self._take(stream, result)
        except RequestError:
            logger.exception("TensorRT-LLM failed on a request")
            self._end(stream)
        else:
            self._end(stream)

    def _take(self, stream: _Stream, result: Any) -> None:
        self._watchdog.heard()
        if stream.is_silent:
            return
        reader, begun = stream.order.reader, stream.order.reader.has_begun
        try:
            new = reader.read(result)
        except EngineError as error:
            self._emit(_failed(stream.order.id, error))
            reader.has_ended = True
            if not result.finished:
                self.abort(stream.order.id)
            return
        if new is not None:
            if not begun:
                self.num_free_blocks = max(0, self.num_free_blocks - stream.order.num_prompt_blocks)
            self._emit(new)

    def _end(self, stream: _Stream) -> None:
        request_id = stream.order.id
        self._watchdog.ended(request_id)
        if self._streams.pop(request_id, None) is None:
            return
        if stream.is_silent:
            self._release([request_id])
        elif not stream.order.reader.has_ended:
            self._emit(_failed(request_id, _request_failed()))
        self._rest()

    # -- all of them -----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Takes in statistics while there is work, and until nothing more comes after it."""
        while True:
            await self._busy.wait()
            async for stats in self._statistics():
                self._take_sample(read_stats(stats))

    def _statistics(self) -> Any:
        """Ends when none has come for `interval` seconds. TensorRT-LLM takes that for the end of all, unless it is
        told otherwise."""
        statistics = self._llm.get_stats_async(timeout=self._interval)
        statistics.mark_undone()
        return statistics

    def _take_sample(self, sample: IterationSample) -> None:
        self._watchdog.sample(sample.num_active)
        has_grown = sample.num_free_blocks > self.num_free_blocks
        self.num_free_blocks = sample.num_free_blocks
        if has_grown:  # a request may wait for blocks
            self._pipe.ring()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            verdict = self._watchdog.check()
            self._release(verdict.released)
            for request_id in verdict.retry:
                self._streams[request_id].output.abort()
            if verdict.probe:
                self._watchdog.probe_started()
                self._spawn(self._probe())

    async def _probe(self) -> None:
        try:
            async for _ in self._llm.generate_async(**self._probe_arguments):
                pass
        except RequestError:
            logger.warning("TensorRT-LLM refused a probe", exc_info=True)
        self._release(self._watchdog.probe_ended())
        self._rest()

    def _release(self, ids: list[int]) -> None:
        for request_id in ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.task.cancel()
        if ids:
            self._pending.released += ids
            self._flush_soon()
            self._rest()

    def _rest(self) -> None:
        if not self._watchdog.is_busy:
            self._busy.clear()

    def _emit(self, new: NewTokens) -> None:
        self._pending.tokens.append(new)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """After everything that is ready by now: its reader wakes once for all of it."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        output, self._pending, self._flushing = self._pending, BatcherOutput(), False
        self._pipe.put(output)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """An exception that gets out of it is the engine's end."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        logger.error("TensorRT-LLM failed", exc_info=error)
        known = error if isinstance(error, PenstockError) else EngineDeadError(f"TensorRT-LLM failed: {error}")
        self._pipe.fail(known)


def _failed(request_id: int, error: PenstockError) -> NewTokens:
    return NewTokens(request_id, [], FinishReason.ERROR, error=error)


def _request_failed() -> EngineError:
    return EngineError("The engine failed on this request.")
