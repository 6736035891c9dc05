"""`VLLMRunner`: a model runner on vLLM's executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.sampling_params import SamplingParams as VLLMSamplingParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.output import SchedulerOutput as VLLMSchedulerOutput

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.vllm.adapters import Adapters
from penstock.engines.vllm.config import VLLMConfig
from penstock.engines.vllm.model_info import description, eos_token_ids
from penstock.engines.vllm.output import read_output
from penstock.engines.vllm.requests import LiveRequest, usable_blocks
from penstock.engines.vllm.sampling import to_vllm
from penstock.engines.vllm.start import start_for_steps
from penstock.engines.vllm.step import StepBuilder
from penstock.engines.vllm.table import RequestTable

Bitmasks = Callable[[Sequence[int]], Mapping[int, npt.NDArray[np.int32]]]
"""Ids of the requests that get a token in this step -> for those that a grammar rules, which tokens are allowed:
[ceil(vocab / 32)] words, bit i % 32 of word i // 32 for token i."""


class VLLMRunner:
    """A `ModelRunner` and `AdapterHost`. Loading raises UnsupportedError for a model that it cannot drive."""

    bitmasks: Bitmasks | None = None
    """Asked in each step while the forward pass runs (on GPUs) or after it (on CPUs)."""

    def __init__(self, config: VLLMConfig, version: str) -> None:
        self._core = start_for_steps(config)
        self._executor = self._core.model_executor
        settings = self._core.vllm_config
        self._eos = eos_token_ids(settings.model_config)
        self._draws_by_position = bool(settings.use_v2_model_runner)
        self._adapters = Adapters(self._executor, config)
        cache = self._core.scheduler.kv_cache_config
        block_size = cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._table = RequestTable()
        self._builder = StepBuilder(
            self._sampling_of,
            self._adapters,
            block_size=block_size,
            introduces_resumed=self._draws_by_position,
            sends_tokens=config.pipeline_parallel_size > 1,
        )
        self._info = ModelInfo(
            vocab_size=settings.model_config.get_vocab_size(),
            max_model_len=settings.model_config.max_model_len,
            block_size=block_size,
            num_blocks=usable_blocks(cache.num_blocks),
            eos_token_ids=self._eos,
            runner=description(version, settings),
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step (`ModelRunner.execute`)."""
        prepared = self._builder.build(step, self._table)
        if not prepared.output.total_num_scheduled_tokens and not prepared.output.finished_req_ids:
            return ModelRunnerOutput([[] for _ in step.request_ids], failed=prepared.refused)
        if prepared.restored:
            self._executor.collective_rpc("penstock_restore", args=(prepared.restored,))
        result = self._run(prepared.output, self._sampled(step, prepared.refused))
        return read_output(step, self._table, result, prepared.refused)

    def reset(self) -> None:
        self._executor.collective_rpc("penstock_abandon")
        self._table.clear()
        finished = VLLMSchedulerOutput.make_empty()
        finished.finished_req_ids = self._table.take_finished()
        self._executor.execute_model(finished)

    def load_adapter(self, key: str, folder: Path) -> None:
        """`AdapterHost.load_adapter`."""
        self._adapters.load(key, folder)

    def unload_adapter(self, key: str) -> None:
        self._adapters.unload(key)

    def close(self) -> None:
        """Ends vLLM's workers and frees their memory; the runner cannot be used afterwards."""
        self._core.shutdown()

    def _run(self, output: VLLMSchedulerOutput, sampled: list[tuple[int, LiveRequest]]) -> Any:
        future = self._executor.execute_model(output, non_block=True)
        grammar = self._grammar(sampled)
        result = future.result()
        if result is not None:  # nothing was scheduled
            return result
        if not self._draws_by_position:
            seeds = {r.name: seed for _, r in sampled if (seed := r.next_seed) is not None}
            if seeds or self._seeded:
                self._executor.collective_rpc("penstock_seed", args=(seeds,))
            self._seeded = bool(seeds)
        return self._executor.sample_tokens(grammar)

    _seeded = False
    """The workers hold generators, of an earlier step."""

    def _sampled(self, step: SchedulerOutput, refused: dict[int, str]) -> list[tuple[int, LiveRequest]]:
        """The requests that get a token in this step."""
        return [
            (request_id, request)
            for request_id, count, computed in zip(
                step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
            )
            if request_id not in refused and computed + count == len((request := self._table[request_id]).token_ids)
        ]

    def _grammar(self, sampled: list[tuple[int, LiveRequest]]) -> GrammarOutput | None:
        masks = self.bitmasks([request_id for request_id, _ in sampled]) if self.bitmasks else {}
        if not masks:
            return None
        names = [request.name for request_id, request in sampled if request_id in masks]
        rows = [masks[request_id] for request_id, _ in sampled if request_id in masks]
        return GrammarOutput(names, np.stack(rows))

    def _sampling_of(self, request: LiveRequest, score_prompt: bool) -> VLLMSamplingParams:
        seed = request.seed if self._draws_by_position else None
        return to_vllm(request.params, self._eos, seed, score_prompt)
