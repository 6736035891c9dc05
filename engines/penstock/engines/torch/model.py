"""A transformers model that computes steps over a paged cache, and does so on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engines.kit.batch import Int32s, Ints, Outputs, StepBatch
from penstock.engines.torch.attention import PagedAttention, StepTensors, TorchKVCache, attach, make_step
from penstock.engines.torch.lora import TorchAdapters, UsedAdapter
from penstock.engines.torch.recurrent import StepStates, TorchStates, set_handler


class PagedModel:
    """A model of transformers over our cache. `probe.inspect_layers` has found it fit for that."""

    def __init__(self, model: PreTrainedModel, cache: TorchKVCache, states: TorchStates | None = None) -> None:
        self.cache = cache
        self._model = model
        self._attention = PagedAttention(cache)
        attach(model, self._attention)
        self._has_states = states is not None
        if states is not None:
            self._states = StepStates(states, model.config)
            set_handler(list(states.tables), self._states)

    @property
    def device(self) -> torch.device:
        return self._model.device

    def make_step(self, batch: StepBatch) -> StepTensors:
        return make_step(batch, self.cache.views, self.cache.block_size, self.device, has_states=self._has_states)

    @torch.inference_mode()
    def compute(self, step: StepTensors, logits_at: Tensor, *, hidden: bool = False) -> tuple[Tensor, Tensor | None]:
        """Logits [N, vocab] of the tokens whose indices are `logits_at` [N], and with `hidden` what the decoder gave
        for them, behind its final norm [N, hidden size]; on the device, in f32."""
        self._attention.step = step
        if step.pieces:
            self._states.pieces = step.pieces
        states: list[Tensor] = []

        def see(module: nn.Module, args: Any, output: Any) -> None:
            states.append(output[0][0, logits_at].float())

        hook = self._model.base_model.register_forward_hook(see) if hidden else None
        try:
            output = self._model(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=logits_at,
            )
        finally:
            if hook is not None:
                hook.remove()
        return output.logits[0].float(), states[0] if hidden else None


class _Prepared(NamedTuple):
    step: StepTensors
    logits_at: Tensor
    adapters: list[UsedAdapter]
    hidden: bool
    copied: torch.cuda.Event | None
    """When all of it is on the device; None: it is."""


class ThreadedModel:
    """`PagedModel` as the runner kit's `Model`: one thread computes, and others run while it is in torch.

    On CUDA, what is prepared is copied on a stream of its own: on the one that computes, a copy would wait for the step
    under way, and so would the caller.
    """

    num_buffers = 2

    def __init__(self, model: PagedModel, adapters: TorchAdapters) -> None:
        self._model = model
        self._adapters = adapters
        self._thread = ThreadPoolExecutor(1, "torch")
        self._prepared: dict[int, _Prepared] = {}
        self._results: dict[int, Future[Outputs]] = {}
        device = model.device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def adapter_slot(self, key: str) -> int | None:
        """`Model.adapter_slot`."""
        return self._adapters.slot(key)

    def prepare(self, buffer: int, batch: StepBatch) -> None:
        """`Model.prepare`."""
        with torch.cuda.stream(self._copies):  # None: nothing changes
            step = self._model.make_step(batch)
            logits_at = step.places[batch.logits_at]
            adapters = self._adapters.choose(batch.adapter_slots, step.owners, logits_at)
            chosen = torch.from_numpy(logits_at).to(step.token_ids.device)
        copied = None if self._copies is None else self._copies.record_event()
        self._prepared[buffer] = _Prepared(step, chosen, adapters, batch.wants_hidden, copied)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """`Model.copy_blocks`."""
        self._model.cache.copy_blocks(copies)

    def start(self, buffer: int, late: Ints, token_ids: Int32s) -> None:
        """`Model.start`."""
        self._results[buffer] = self._thread.submit(self._compute, self._prepared.pop(buffer), late, token_ids)

    def wait(self, buffer: int) -> Outputs:
        """`Model.wait`."""
        return self._results.pop(buffer).result()

    def close(self) -> None:
        self._thread.shutdown()

    def _compute(self, prepared: _Prepared, late: Ints, token_ids: Int32s) -> Outputs:
        if prepared.copied is None:
            return self._compute_prepared(prepared, late, token_ids)
        stream = torch.cuda.current_stream(self._model.device)
        stream.wait_event(prepared.copied)
        try:
            return self._compute_prepared(prepared, late, token_ids)
        finally:
            stream.synchronize()  # after a failure, too: the other stream takes the memory of its tensors again

    def _compute_prepared(self, prepared: _Prepared, late: Ints, token_ids: Int32s) -> Outputs:
        step, device = prepared.step, self._model.device
        if len(late):
            places = torch.from_numpy(step.places[late]).to(device)
            step.token_ids[places] = torch.from_numpy(token_ids).to(step.token_ids)
        self._adapters.use(prepared.adapters)
        logits, hidden = self._model.compute(step, prepared.logits_at, hidden=prepared.hidden)
        return Outputs(logits.cpu().numpy(), None if hidden is None else hidden.cpu().numpy())
