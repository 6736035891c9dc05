"""Additions to vLLM's workers: methods that its executors call by name, in whatever process a worker lives.

Only vLLM's older model runner (the one of CPUs) needs them. The newer one takes resumed requests whole and draws its
random numbers from (seed, position) by itself.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any, Self

import torch
from vllm.v1.core.sched.output import NewRequestData

from penstock.engines.host.parent_death import die_with_parent
from penstock.engines.kit.package_contract import missing_attributes
from penstock.engines.kit.sampling.uniform import uniform

RANDOM_KEY = "penstock_random_key"
"""In `SamplingParams.extra_args`: the key of a seed's sequence of random numbers."""
_USED = (
    *("input_batch.generators", "input_batch.random_reqs", "input_batch.req_id_to_index", "discard_request_mask.np"),
    *("requests", "_sample", "execute_model_state", "kv_caches"),
)
"""Attributes of the model runner's object."""


class WorkerExtension:
    """A mixin of vLLM's worker class (`worker_extension_cls`); `self.model_runner` is the worker's."""

    model_runner: Any

    def __new__(cls, *_: object, **__: object) -> Self:
        """A worker with a process of its own ends with the engine's, whatever it does. vLLM's workers notice that end
        only when they wait for the next step: not while they load, and not in an operation that waits for others."""
        parent = multiprocessing.parent_process()
        if parent is not None:
            die_with_parent()
            if not parent.is_alive():  # since before that
                os._exit(1)
        return super().__new__(cls)

    def penstock_draw_by_position(self) -> set[str]:
        """From now on the random numbers of an output token are a function of its request's key and its number alone:
        what came before it (a chunked prompt, a preemption) cannot matter.

        vLLM's own generators go on from token to token, and have to be set back after each chunk of a prompt, which
        those of CPUs cannot be. Returns the attributes that the model runner lacks.
        """
        runner = self.model_runner
        moved = set(missing_attributes(type(runner).__name__, runner, _USED))
        if not moved:
            sample, generators = runner._sample, _Generators(runner)

            def seeded(*arguments: Any, **options: Any) -> Any:
                generators.seed_rows()
                return sample(*arguments, **options)

            runner._sample = seeded
        return moved

    def penstock_restore(self, requests: Sequence[tuple[NewRequestData, list[int]]]) -> None:
        """Makes requests known that have output tokens already, as if they had been preempted by vLLM itself."""
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        for data, output_token_ids in requests:
            self.model_runner.requests[data.req_id] = CachedRequestState(
                req_id=data.req_id,
                prompt_token_ids=data.prompt_token_ids,
                mm_features=[],
                sampling_params=data.sampling_params,
                generator=None,
                block_ids=data.block_ids,
                num_computed_tokens=data.num_computed_tokens,
                output_token_ids=output_token_ids,
                lora_request=data.lora_request,
            )

    def penstock_kv_caches(self) -> list[torch.Tensor]:
        """Of each layer. Only for who lives in the worker's process."""
        caches: list[torch.Tensor] = self.model_runner.kv_caches
        return caches

    def penstock_abandon(self) -> None:
        """After a failed step: forgets a forward pass that was never sampled from."""
        self.model_runner.execute_model_state = None


class _Generators:
    """One for each row of the batch, seeded again for each token."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._of_row: list[torch.Generator] = []

    def seed_rows(self) -> None:
        """Between a forward pass and its sampling."""
        runner, batch = self._runner, self._runner.input_batch
        batch.generators.clear()
        for name in batch.random_reqs:
            row = batch.req_id_to_index[name]
            request = runner.requests[name]
            key = (request.sampling_params.extra_args or {}).get(RANDOM_KEY)
            if key is None or runner.discard_request_mask.np[row]:
                continue
            while len(self._of_row) <= row:
                self._of_row.append(torch.Generator(device=runner.device))
            seed = int(uniform(key, len(request.output_token_ids)) * 2.0**32)
            batch.generators[row] = self._of_row[row].manual_seed(seed)
