"""A language model as a decoupled KServe model: the tensors of Triton's vLLM backend over our own data plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.engines.classic.messages import InferRequest, InferResponse
from penstock.engines.classic.model_config import ModelConfig
from penstock.engines.classic.signature import ModelSignature
from penstock.engines.classic.statistics import ModelStatistics
from penstock.engines.classic.tensors import Tensor
from penstock.engines.classic.validation import check_request
from penstock.engines.errors import EngineError, NotReadyError, OverloadedError, PenstockError, UnsupportedError
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.generation import ChoiceDelta, Generation, TokenLogprob
from penstock.gateway.kserve.llm_request import TextRequest, llm_config, read_request
from penstock.gateway.models import LoadedModel


class LanguageModel:
    """Implements InferModel. `policy` is the scheduler's; `on_stop` is called when the model shall take no more."""

    def __init__(
        self,
        dataplane: DataPlane,
        model: LoadedModel,
        name: str,
        *,
        policy: str,
        version: int = 1,
        config: ModelConfig | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.config = config or llm_config(name)
        self.statistics = ModelStatistics()
        self._dataplane = dataplane
        self._model = model
        self._policy = policy
        self.signature = ModelSignature(self.config)
        self._stopping = False

    @property
    def ready(self) -> bool:
        return self._model.loaded and self._model.engine.ready and not self._stopping

    takes_infer = True
    model_folder: Path | None = None

    async def infer(self, request: InferRequest) -> InferResponse:
        """For requests that do not stream: those have exactly one response."""
        text = self._read(request)
        if text.stream:
            raise UnsupportedError("a request with 'stream' set has many responses; it needs a stream to carry them")
        responses = LanguageStream(self._dataplane, self._model, text, self.statistics)
        try:
            response = await responses.__anext__()
        finally:
            responses.close()
        if response.error is not None:
            raise response.error
        return _requested(response, request)

    def stream(self, request: InferRequest) -> LanguageStream:
        return LanguageStream(self._dataplane, self._model, self._read(request), self.statistics, request.outputs)

    def _read(self, request: InferRequest) -> TextRequest:
        try:
            if self._stopping or not self._model.loaded:
                raise NotReadyError(f"Model '{self.name}' is not ready.", retry_after=2)
            check_request(request, self.signature)
            timeout = None if request.deadline is None else max(request.deadline - time.monotonic(), 1e-3)
            text = read_request(request, self._model.describe(self.name), self._policy, timeout)
            if text.adapter is not None:
                self._model.adapters.named(text.adapter)
            return text
        except PenstockError:
            self.statistics.failed(0, "REJECTED")
            raise

    async def stop(self) -> None:
        self._stopping = True
        self._dataplane.remove(self._model)
        await self._model.in_flight.wait_idle()
        await self._model.engine.stop()


def _requested(response: InferResponse, request: InferRequest) -> InferResponse:
    if request.outputs and response.outputs:
        response.outputs = [tensor for tensor in response.outputs if tensor.name in request.outputs]
    return response


class LanguageStream:
    """The responses of one request: deltas as they come, or everything at the end."""

    def __init__(
        self,
        dataplane: DataPlane,
        model: LoadedModel,
        request: TextRequest,
        statistics: ModelStatistics,
        outputs: Sequence[str] = (),
    ) -> None:
        self._dataplane = dataplane
        self._model = model
        self._request = request
        self._statistics = statistics
        self._outputs = frozenset(outputs)
        self._generation: Generation | None = None
        self._live = request.generate.n
        self._sums = [0.0] * request.generate.n
        """Of the logprobs of each choice's tokens so far."""
        self._begun = time.monotonic_ns()
        self._first = True
        self._ended = False
        statistics.pending += 1

    def __aiter__(self) -> LanguageStream:
        return self

    async def __anext__(self) -> InferResponse:
        if self._ended:
            raise StopAsyncIteration
        try:
            deltas = await self._advance()
            while not self._request.stream and self._live:
                deltas = _merged(deltas, await self._advance())
        except PenstockError as error:
            self._end("REJECTED" if isinstance(error, OverloadedError) else "BACKEND")
            return InferResponse(None, error=error)
        final = not self._live
        response = InferResponse(self._tensors(deltas), final=final)
        if final:
            self._succeeded()
        return response

    def ready(self) -> InferResponse | None:
        """Nothing: whatever has come is in one response already."""
        return None

    async def _advance(self) -> list[ChoiceDelta]:
        if self._generation is None:
            self._generation = await self._dataplane.generate_on(
                self._model, self._request.generate, adapter=self._request.adapter
            )
            self._statistics.pending -= 1
        try:
            deltas = await self._generation.__anext__()
        except StopAsyncIteration:
            raise EngineError("The engine ended the request without a reason.") from None
        self._live -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    def close(self) -> None:
        self._end("CANCELED")

    def _end(self, reason: str) -> None:
        """Counts a request that did not succeed, and gives up what still runs."""
        if self._ended:
            return
        self._ended = True
        if self._generation is None:
            self._statistics.pending -= 1
        else:
            self._generation.close()
        self._statistics.failed(time.monotonic_ns() - self._begun, reason)

    def _succeeded(self) -> None:
        self._ended = True
        total = time.monotonic_ns() - self._begun
        queue = min(int(self._generation.queue_seconds * 1e9), total) if self._generation else 0
        self._statistics.executed(1, 0, total - queue, 0)
        self._statistics.succeeded(
            requests=1,
            inferences=1,
            total=total,
            queue=queue,
            compute_input=0,
            compute_infer=total - queue,
            compute_output=0,
        )

    def _tensors(self, deltas: list[ChoiceDelta]) -> list[Tensor]:
        """One element for each choice; those without news have an empty text."""
        by_index: list[ChoiceDelta | None] = [None] * self._request.generate.n
        for delta in deltas:
            by_index[delta.index] = delta
        prefix = self._request.prefix if self._first else ""
        self._first = False
        texts = [(prefix + (delta.text if delta else "")).encode() for delta in by_index]
        tensors = [_strings("text_output", texts)]
        returns = self._request.returns
        if returns:
            tensors += [_EXTRA[name](self, by_index) for name in _EXTRA if name in returns]
        if self._outputs:
            tensors = [tensor for tensor in tensors if tensor.name in self._outputs]
        return tensors

    def _finish_reasons(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        return _strings("finish_reason", [str(delta and delta.finish_reason).encode() for delta in deltas])

    def _cumulative(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        for index, delta in enumerate(deltas):
            self._sums[index] += sum(entry.logprob for entry in delta.logprobs or ()) if delta else 0.0
        return Tensor("cumulative_logprob", "FP32", np.array(self._sums, np.float32))

    def _logprobs(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        shown = self._request.logprobs
        return _strings(
            "logprobs",
            [_logprobs_json(delta.logprobs or []) if delta and shown else b"null" for delta in deltas],
        )

    def _num_input(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        count = self._generation.usage.prompt_tokens if self._generation else 0
        return Tensor("num_input_tokens", "UINT32", np.array([count], np.uint32))

    def _num_output(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        counts = [len(delta.token_ids) if delta else 0 for delta in deltas]
        return Tensor("num_output_tokens", "UINT32", np.array(counts, np.uint32))


_EXTRA: dict[str, Callable[[LanguageStream, Sequence[ChoiceDelta | None]], Tensor]] = {
    "finish_reason": LanguageStream._finish_reasons,
    "cumulative_logprob": LanguageStream._cumulative,
    "logprobs": LanguageStream._logprobs,
    "num_input_tokens": LanguageStream._num_input,
    "num_output_tokens": LanguageStream._num_output,
}


def _strings(name: str, values: list[bytes]) -> Tensor:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return Tensor(name, "BYTES", array)


def _logprobs_json(entries: Sequence[TokenLogprob]) -> bytes:
    """vLLM's form: for each token an object of token id -> {logprob, rank, decoded_token}, the sampled one included."""
    shown = []
    for entry in entries:
        found = {
            str(other.token_id): {"logprob": other.logprob, "rank": rank, "decoded_token": other.token}
            for rank, other in enumerate(entry.top, 1)
        }
        found[str(entry.token_id)] = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.token}
        shown.append(found)
    return msgspec.json.encode(shown)


def _merged(before: list[ChoiceDelta], after: list[ChoiceDelta]) -> list[ChoiceDelta]:
    """The deltas of both, one for each choice. Appends in place: a long answer is not copied for each of its steps."""
    known = {delta.index: delta for delta in before}
    for delta in after:
        first = known.get(delta.index)
        if first is None:
            before.append(delta)
            continue
        first.text += delta.text
        first.token_ids += delta.token_ids
        first.finish_reason = delta.finish_reason
        if delta.logprobs is not None:
            first.logprobs = [*(first.logprobs or ()), *delta.logprobs]
    return before
