"""From our SchedulerOutput to vLLM's: who is new, who goes on, who comes back, and whose blocks have changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams as VLLMSamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.output import SchedulerOutput as VLLMSchedulerOutput

from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.errors import InvalidRequestError
from penstock.engines.vllm.adapters import Adapters
from penstock.engines.vllm.requests import NULL_BLOCK, LiveRequest, to_vllm_blocks
from penstock.engines.vllm.table import RequestTable

SamplingOf = Callable[[LiveRequest, bool], VLLMSamplingParams]
"""(request, whether its prompt is scored) -> its parameters for vLLM; raises ValueError for what vLLM refuses."""


@dataclass(slots=True)
class PreparedStep:
    output: VLLMSchedulerOutput
    restored: list[tuple[NewRequestData, list[int]]] = field(default_factory=list)
    """Requests that the workers must know with these output tokens before the step."""
    refused: dict[int, str] = field(default_factory=dict)
    """id -> message: requests that vLLM cannot take; the step goes on without them."""


class StepBuilder:
    """`introduces_resumed`: the workers take a resumed request as a new one with all of its tokens (vLLM's model
    runner V2); otherwise they must be given its output tokens first."""

    def __init__(
        self,
        sampling_of: SamplingOf,
        adapters: Adapters,
        *,
        block_size: int,
        introduces_resumed: bool,
        sends_tokens: bool,
    ) -> None:
        self._block_size = block_size
        self._sampling_of = sampling_of
        self._adapters = adapters
        self._introduces_resumed = introduces_resumed
        self._sends_tokens = sends_tokens
        """Workers of the first pipeline stages do not see what the last one samples."""

    def build(self, step: SchedulerOutput, table: RequestTable) -> PreparedStep:
        """Applies `step` to the table, in the order that SchedulerOutput prescribes, and says the same to vLLM."""
        fresh = {new.id for new in step.new_requests}
        table.drop(step.dropped_ids)
        for new in step.new_requests:
            table.add(new)
        replaced = self._apply_blocks(step, table, fresh)
        prepared = PreparedStep(VLLMSchedulerOutput.make_empty())
        cached = CachedRequestData.make_empty()
        output = prepared.output
        for request_id, count, computed in zip(
            step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        ):
            request = table[request_id]
            if request_id in fresh or (request_id in replaced and self._introduces_resumed):
                try:
                    data = self._introduce(request, computed)
                except (ValueError, VLLMValidationError, InvalidRequestError) as e:
                    prepared.refused[request_id] = str(e)
                    continue
                if self._introduces_resumed or not request.num_output_tokens:
                    output.scheduled_new_reqs.append(data)
                else:
                    prepared.restored.append((data, request.output_token_ids))
                    self._resume(cached, request, computed, count)
            elif request_id in replaced:
                self._resume(cached, request, computed, count)
            else:
                _, new_blocks = step.new_block_ids.get(request_id, (0, None))
                self._continue(cached, request, computed, count, new_blocks and to_vllm_blocks(new_blocks))
            output.num_scheduled_tokens[request.name] = count
        output.scheduled_cached_reqs = cached
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.finished_req_ids = table.take_finished()
        copies = self._block_copies(step, table)
        if copies:
            output.kv_cache_block_copies = copies
        return prepared

    def _block_copies(self, step: SchedulerOutput, table: RequestTable) -> list[KVCacheBlockCopy]:
        """The step's, and the null block over each fresh block that a request with broken logits has held.

        Kernels multiply what lies behind a request's last token with zero, which does not make a NaN go away.
        """
        copies = [KVCacheBlockCopy(*to_vllm_blocks(list(copy))) for copy in step.block_copies]
        tainted = table.tainted
        if not tainted:
            return copies
        computed = dict(zip(step.request_ids, step.num_computed_tokens, strict=True))
        fresh = {block for _, blocks in step.new_block_ids.values() for block in to_vllm_blocks(blocks)}
        for new in step.new_requests:
            fresh.update(to_vllm_blocks(new.block_ids[-(-computed[new.id] // self._block_size) :]))
        fresh.difference_update(copy.dst_block_id for copy in copies)
        cleaned = sorted(tainted & fresh)
        for copy in copies:
            (tainted.add if copy.src_block_id in tainted else tainted.discard)(copy.dst_block_id)
        tainted.difference_update(cleaned)
        return [*(KVCacheBlockCopy(NULL_BLOCK, block) for block in cleaned), *copies]

    def _apply_blocks(self, step: SchedulerOutput, table: RequestTable, fresh: set[int]) -> set[int]:
        """Returns the ids of requests that lost a block for another, which vLLM can only be told with a whole table."""
        replaced = set()
        for request_id, (index, block_ids) in step.new_block_ids.items():
            request = table[request_id]
            if index < len(request.block_ids) and request_id not in fresh:
                replaced.add(request_id)
                if self._introduces_resumed:
                    table.rename(request_id)
            request.block_ids[index:] = to_vllm_blocks(block_ids)
        return replaced

    def _introduce(self, request: LiveRequest, computed: int) -> NewRequestData:
        adapter = self._adapters[request.adapter]
        # a prompt is scored once, by the request that computes all of it
        score_prompt = request.params.prompt_logprobs is not None and not computed and not request.num_output_tokens
        return NewRequestData(
            req_id=request.name,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            mm_features=[],
            sampling_params=self._sampling_of(request, score_prompt),
            pooling_params=None,
            block_ids=(list(request.block_ids),),
            num_computed_tokens=computed,
            lora_request=adapter,
            prefill_token_ids=list(request.token_ids) if self._introduces_resumed else None,
        )

    def _resume(self, cached: CachedRequestData, request: LiveRequest, computed: int, count: int) -> None:
        cached.resumed_req_ids.add(request.name)
        self._continue(cached, request, computed, count, list(request.block_ids))

    def _continue(
        self, cached: CachedRequestData, request: LiveRequest, computed: int, count: int, new_blocks: list[int] | None
    ) -> None:
        cached.req_ids.append(request.name)
        cached.new_block_ids.append((new_blocks,) if new_blocks else None)
        cached.num_computed_tokens.append(computed)
        cached.num_output_tokens.append(request.num_output_tokens)
        if self._sends_tokens:
            cached.new_token_ids.append(request.token_ids[computed : computed + count])
