"""What vLLM's workers get in addition: methods that its executors call by name, in whatever process a worker lives.

Only vLLM's older model runner (the one of CPUs) needs them. The newer one takes resumed requests whole and draws its
random numbers from (seed, position) by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.core.sched.output import NewRequestData


class WorkerExtension:
    """A mixin of vLLM's worker class (`worker_extension_cls`); `self.model_runner` is the worker's."""

    model_runner: Any

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

    def penstock_seed(self, seeds: Mapping[str, int]) -> None:
        """Between a forward pass and its sampling: the random number generators for this step's tokens.

        Each token has a seed of its own, so that what came before it (a chunked prompt, a preemption) cannot matter.
        """
        batch = self.model_runner.input_batch
        generators = batch.generators
        generators.clear()
        for name, seed in seeds.items():
            generator = torch.Generator(device=self.model_runner.device)
            generators[batch.req_id_to_index[name]] = generator.manual_seed(seed)

    def penstock_abandon(self) -> None:
        """After a failed step: forgets a forward pass that was never sampled from."""
        self.model_runner.execute_model_state = None
