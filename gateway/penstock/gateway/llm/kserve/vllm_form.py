"""The responses of Triton's vLLM backend.

Source: triton-inference-server/vllm_backend, src/utils/request.py and docs/additional_outputs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from penstock.classic.tensors import Tensor
from penstock.gateway.llm.choice_output import ChoiceDelta, TokenLogprob
from penstock.gateway.llm.kserve.request_reader import INPUTS, OUTPUTS, RETURNS, UNSERVED, read_request
from penstock.gateway.llm.kserve.tensor_form import Form, TextRequest, strings


class VllmWriter:
    """One element for each choice; those without news have an empty text."""

    def __init__(self, request: TextRequest) -> None:
        self._returns = request.returns
        self._shows_logprobs = request.logprobs
        self._prefix = request.prefix
        self._sums = [0.0] * request.generate.n
        """Of the logprobs of each choice's tokens so far."""
        self._prompt_tokens = 0

    def tensors(self, deltas: Sequence[ChoiceDelta | None], prompt_tokens: int) -> list[Tensor]:
        prefix, self._prefix = self._prefix, ""
        tensors = [strings("text_output", [prefix + (delta.text if delta else "") for delta in deltas])]
        if self._returns:
            self._prompt_tokens = prompt_tokens
            tensors += [_EXTRA[name](self, deltas) for name in RETURNS if name in self._returns]
        return tensors

    def _finish_reasons(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        return strings("finish_reason", [str(delta and delta.finish_reason) for delta in deltas])

    def _cumulative(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        add_logprobs(self._sums, deltas)
        return Tensor("cumulative_logprob", "FP32", np.array(self._sums, np.float32))

    def _logprobs(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        shown = self._shows_logprobs
        return strings(
            "logprobs",
            [_logprobs_json(delta.logprobs or []) if delta and shown else b"null" for delta in deltas],
        )

    def _num_input(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        return Tensor("num_input_tokens", "UINT32", np.array([self._prompt_tokens], np.uint32))

    def _num_output(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        counts = [len(delta.token_ids) if delta else 0 for delta in deltas]
        return Tensor("num_output_tokens", "UINT32", np.array(counts, np.uint32))


_EXTRA: dict[str, Callable[[VllmWriter, Sequence[ChoiceDelta | None]], Tensor]] = {
    "finish_reason": VllmWriter._finish_reasons,
    "cumulative_logprob": VllmWriter._cumulative,
    "logprobs": VllmWriter._logprobs,
    "num_input_tokens": VllmWriter._num_input,
    "num_output_tokens": VllmWriter._num_output,
}


def add_logprobs(sums: list[float], deltas: Sequence[ChoiceDelta | None]) -> None:
    """Adds those of the new tokens to each choice's sum."""
    for index, delta in enumerate(deltas):
        sums[index] += sum(entry.logprob for entry in delta.logprobs or ()) if delta else 0.0


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


VLLM_FORM = Form(INPUTS, OUTPUTS, UNSERVED, read_request, VllmWriter)
"""Of the backends `vllm` and `penstock`, and of models that stand on the command line."""
