"""`VLLMBatcher`: vLLM's own engine core with its own scheduler, one iteration for each step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import FinishReason as VLLMFinishReason

from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens, StartRequest
from penstock.engines.contract.messages import FinishReason, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import (
    ContextLengthError,
    InvalidRequestError,
    NumericalError,
    OverloadedError,
    StepFailedError,
)
from penstock.engines.kit.adapter_slots import WithAdapters
from penstock.engines.vllm.adapters import VLLMAdapters
from penstock.engines.vllm.config import VLLMConfig
from penstock.engines.vllm.contract import check_core
from penstock.engines.vllm.model_info import (
    NOT_FINITE,
    capacity,
    description,
    end_token_ids,
    number_types,
    token_logprobs,
)
from penstock.engines.vllm.sampling import to_structured_outputs, to_vllm
from penstock.engines.vllm.start import start_scheduling
from penstock.engines.vllm.step import NULL_BLOCK
from penstock.kvcache import KVGroup

_FINISH = {
    VLLMFinishReason.STOP: FinishReason.STOP,
    VLLMFinishReason.LENGTH: FinishReason.LENGTH,
    VLLMFinishReason.ABORT: FinishReason.ABORT,
    VLLMFinishReason.ERROR: FinishReason.ERROR,
    VLLMFinishReason.REPETITION: FinishReason.STOP,
}


class VLLMBatcher(WithAdapters[VLLMAdapters]):
    """A `ContinuousBatcher` and `AdapterHost` with everything that vLLM's scheduler does: models with several kinds of
    layers, speculative decoding, its prefix cache, asynchronous scheduling on GPUs."""

    wakeup: int | None = None

    def __init__(self, config: VLLMConfig, version: str) -> None:
        """Raises InvalidRequestError and UnsupportedError for what vLLM does not take."""
        self._core = start_scheduling(config, version)
        check_core(version, self._core)
        self._watch = SchedulerWatch(self._core)
        self._adapters = VLLMAdapters(self._core.model_executor, config)
        settings = self._core.vllm_config
        self._settings = settings
        self._eos = end_token_ids(settings.model_config, config.model_dir)
        self._pool = self._core.scheduler.kv_cache_manager.block_pool
        self._capacity = capacity(settings, self._core.scheduler.kv_cache_config)
        self._tokenizer = cached_tokenizer_from_config(settings.model_config)
        self._live: dict[str, StartRequest] = {}
        self._released: list[int] = []
        self._info = ModelInfo(
            vocab_size=settings.model_config.get_vocab_size(),
            max_model_len=self._capacity.longest,
            kv_groups=(KVGroup(self._capacity.block_size),),
            num_blocks=self._capacity.num_blocks,
            eos_token_ids=self._eos,
            runner=description(version, settings, ", vLLM's scheduler"),
            numerics=number_types(settings),
            supports_grammars=self._tokenizer is not None,
        )

    @property
    def info(self) -> ModelInfo:
        """`max_model_len` is what the KV cache can hold of one request, where that is less than the model's own limit;
        blocks are counted as in `model_info.Capacity`."""
        return self._info

    @property
    def num_free_blocks(self) -> int:
        return self._capacity.in_blocks(self._pool.get_num_free_blocks())

    def start(self, request: StartRequest) -> None:
        """`ContinuousBatcher.start`: parameters that vLLM does not take end this request alone."""
        name = str(request.id)
        if name in self._live:
            raise InvalidRequestError(f"request {name} runs already")
        settings, params = self._settings, request.params
        total = len(request.prompt_token_ids) + params.max_tokens
        if total > self._capacity.longest:  # vLLM would preempt it again and again
            raise ContextLengthError(f"the request could grow to {total} tokens, more than {self._capacity.longest}")
        try:
            scores = params.prompt_logprobs is not None
            sampling = to_vllm(params, self._eos, request.seed, scores, bool(settings.use_v2_model_runner))
            if params.grammar is not None:
                backend = settings.structured_outputs_config.backend
                sampling.structured_outputs = to_structured_outputs(params.grammar, backend)
            sampling.verify(
                settings.model_config, settings.speculative_config, settings.structured_outputs_config, self._tokenizer
            )
        except (ValueError, VLLMValidationError) as e:
            raise InvalidRequestError(str(e)) from e
        theirs, wave = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=self._adapters[request.adapter],
                cache_salt=request.cache_salt or None,
                data_parallel_rank=None,
                priority=request.priority,
            )
        )
        self._core.add_request(theirs, wave)
        self._live[name] = request

    def abort(self, ids: Sequence[int]) -> None:
        names = [name for i in ids if (name := str(i)) in self._live]
        self._core.abort_requests(names)
        for name in names:
            self._released.append(self._live.pop(name).id)

    def step(self) -> BatcherOutput:
        """One iteration of vLLM's core (`ContinuousBatcher.step`). On GPUs the outputs are those of the one before,
        while the new one runs. When the last request has ended, it waits for steps whose requests have all ended."""
        output = BatcherOutput(released=self._released)
        self._released = []
        self._iterate(output)
        for _ in range(self._core.batch_queue_size):
            if self._live or not (self._core.batch_queue or self._core.scheduler.has_requests()):
                break
            self._iterate(output)
        output.num_scheduled_tokens, output.num_preemptions = self._watch.take_counts()
        return output

    def reset_prefix_cache(self) -> None:
        """`ContinuousBatcher.reset_prefix_cache`. vLLM does it only while no request holds a block."""
        if not self._core.reset_prefix_cache():
            raise OverloadedError("vLLM empties its prefix cache only while no request runs.")

    def close(self) -> None:
        """Ends vLLM's workers and frees their memory."""
        self._core.shutdown()

    def _iterate(self, output: BatcherOutput) -> None:
        by_client, executed = self._core.step_fn()
        self._core.post_step(executed)
        for outputs in by_client.values() if by_client else ():
            for theirs in outputs.outputs:
                live = self._live.get(theirs.request_id)
                if live is not None:
                    output.tokens.append(self._read(theirs, live))
        for name in self._watch.take_broken():
            if name in self._live:
                live = self._live.pop(name)
                output.tokens.append(NewTokens(live.id, [], FinishReason.ERROR, error=NumericalError(NOT_FINITE)))

    def _read(self, theirs: Any, live: StartRequest) -> NewTokens:
        new = NewTokens(live.id, theirs.new_token_ids)
        params = live.params
        if params.logprobs is not None and theirs.new_logprobs is not None:
            rows = theirs.new_logprobs
            new.logprobs = token_logprobs(rows[0], rows[1], rows[2], params.logprobs)
            if not all(math.isfinite(entry.logprob) for entry in new.logprobs):
                self._watch.end([theirs.request_id])
                self._live.pop(theirs.request_id)
                return NewTokens(live.id, [], FinishReason.ERROR, error=NumericalError(NOT_FINITE))
        scored = theirs.new_prompt_logprobs_tensors
        if scored is not None and params.prompt_logprobs is not None:
            new.prompt_logprobs = token_logprobs(scored[0], scored[1], scored[2], params.prompt_logprobs)
        if theirs.prefill_stats is not None:
            new.num_cached_tokens = theirs.prefill_stats.num_cached_tokens
        if theirs.finish_reason is not None:
            self._finish(new, theirs, params)
        return new

    def _finish(self, new: NewTokens, theirs: Any, params: SamplingParams) -> None:
        self._live.pop(theirs.request_id)
        new.finish_reason = _FINISH[theirs.finish_reason]
        if new.finish_reason is FinishReason.ERROR:
            new.error = StepFailedError("The engine failed on this request.")
        stop = theirs.stop_reason
        if stop in params.stop_token_ids and stop not in self._eos:
            new.stop_token_id = stop


class SchedulerWatch:
    """Takes the place of two methods of vLLM's scheduler object, and calls them.

    vLLM counts NaNs in a request's logits and goes on with it. Here it ends, before its tokens are looked at. Blocks
    that only it holds leave the prefix cache and are overwritten before their next use: kernels multiply what lies
    behind a request's last token with zero, which does not make a NaN go away.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._schedule = core.scheduler.schedule
        self._update = core.scheduler.update_from_output
        # the rows of drafted tokens are not those of requests, and the older runner does not say whose they are
        self._names_rows = not core.use_spec_decode or bool(core.vllm_config.use_v2_model_runner)
        self._tainted: set[int] = set()
        self._broken: list[str] = []
        self._num_tokens = 0
        self._num_preemptions = 0
        core.scheduler.schedule = self._scheduled
        core.scheduler.update_from_output = self._computed

    def take_broken(self) -> list[str]:
        """Requests that have ended since the last call, since their logits were not finite."""
        broken, self._broken = self._broken, []
        return broken

    def take_counts(self) -> tuple[int, int]:
        """Tokens scheduled and requests preempted since the last call."""
        counts = self._num_tokens, self._num_preemptions
        self._num_tokens = self._num_preemptions = 0
        return counts

    def end(self, names: Iterable[str]) -> None:
        """Gives requests up whose keys and values must not be used."""
        names = [name for name in names if name in self._scheduler.requests]
        if not names:
            return
        manager = self._scheduler.kv_cache_manager
        pool = manager.block_pool.blocks
        held = {block for name in names for group in manager.get_block_ids(name) for block in group}
        sole = {block for block in held if block != NULL_BLOCK and pool[block].ref_cnt == 1}
        manager.evict_blocks(sole)
        self._tainted |= sole
        self._core.abort_requests(names)

    def _scheduled(self, *arguments: Any, **options: Any) -> Any:
        output = self._schedule(*arguments, **options)
        self._num_tokens += output.total_num_scheduled_tokens
        self._num_preemptions += len(output.preempted_req_ids or ())
        if self._tainted and output.total_num_scheduled_tokens:
            copies = output.kv_cache_block_copies or []
            # targets of the step's own copies are overwritten anyway, and their sources are in use
            busy = {block for copy in copies for block in copy}
            output.kv_cache_block_copies = [
                *(KVCacheBlockCopy(NULL_BLOCK, block) for block in sorted(self._tainted - busy)),
                *copies,
            ]
            self._tainted.clear()
        return output

    def _computed(self, output: Any, result: Any) -> Any:
        counts = result.num_nans_in_logits
        if counts and self._names_rows:
            broken = [name for name, count in counts.items() if count]
            if broken:
                self.end(broken)
                self._broken += broken
        return self._update(output, result)
