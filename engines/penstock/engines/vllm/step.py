"""Steps and the requests in them, from our SchedulerOutput to vLLM's: which are new, go on or come back, and whose
blocks have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams as VLLMSamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.core.sched.output import SchedulerOutput as VLLMSchedulerOutput

from penstock.engines.contract.messages import PoolingParams, SamplingParams
from penstock.engines.contract.step import NewRequest, SchedulerOutput
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError, StepFailedError
from penstock.engines.kit.sampling.grammar import GrammarState
from penstock.engines.vllm.adapters import VLLMAdapters
from penstock.kvcache import NO_BLOCK, KVGroup

NULL_BLOCK = 0
"""vLLM leaves it to padding and to what lies behind windows, and never writes it: our block b is its block b + 1."""
_NULL_BLOCKS = 1


@dataclass(slots=True)
class LiveRequest:
    name: str
    """Its id in vLLM. A request that comes back after a preemption has a new one."""
    token_ids: list[int]
    """Prompt and output, as far as they are known."""
    num_prompt_tokens: int
    block_ids: tuple[list[int], ...]
    """vLLM's numbers, a table for each group."""
    params: SamplingParams
    seed: int
    adapter: str
    grammar: GrammarState | None = None
    num_pending: int = 0
    """Tokens that steps under way are to sample."""
    refusal: PenstockError | None = None
    """Why vLLM was never told of it."""

    @property
    def num_tokens(self) -> int:
        """Those to be sampled by steps under way included."""
        return len(self.token_ids) + self.num_pending

    @property
    def output_token_ids(self) -> list[int]:
        """All of them. No step under way samples another one."""
        if self.num_pending:
            raise EngineError("a request is told again while a step under way samples for it")
        return self.token_ids[self.num_prompt_tokens :]


class VLLMRequestTable:
    """The live requests by id, and which of their names vLLM's workers still have to forget."""

    def __init__(self, start_grammar: Callable[[Any, Sequence[int]], GrammarState]) -> None:
        """`start_grammar`: what makes a state of `NewRequest.grammar` and the output so far."""
        self._start_grammar = start_grammar
        self._requests: dict[int, LiveRequest] = {}
        self._finished: set[str] = set()
        self._num_names = 0
        self.tainted: set[int] = set()
        """vLLM's blocks that requests with broken logits have held, and that nobody has cleaned since."""

    def __getitem__(self, request_id: int) -> LiveRequest:
        return self._requests[request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, new: NewRequest) -> None:
        if isinstance(new.params, PoolingParams):
            raise EngineError("vLLM's executor gives no vectors here")
        self.drop([new.id])
        self._requests[new.id] = LiveRequest(
            name=self._new_name(),
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            block_ids=tuple(to_vllm_blocks(table) for table in new.block_ids),
            params=new.params,
            seed=new.seed,
            adapter=new.adapter,
            grammar=self._grammar_of(new),
        )

    def drop(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._finished.add(request.name)

    def rename(self, request_id: int) -> None:
        """The workers are to forget the request under its old name, and will be told all of it under a new one."""
        request = self._requests[request_id]
        self._finished.add(request.name)
        request.name = self._new_name()

    def taint(self, request: LiveRequest) -> None:
        """Its logits were broken, so its keys and values may be."""
        self.tainted.update(*request.block_ids)
        self.tainted.discard(NULL_BLOCK)

    def take_finished(self) -> set[str]:
        """Names that the workers have to forget, each told once."""
        finished, self._finished = self._finished, set()
        return finished

    def clear(self) -> None:
        self.drop(list(self._requests))

    def _grammar_of(self, new: NewRequest) -> GrammarState | None:
        if new.grammar is None:
            return None
        return self._start_grammar(new.grammar, new.token_ids[new.num_prompt_tokens :])

    def _new_name(self) -> str:
        self._num_names += 1
        return f"r{self._num_names}"


def to_vllm_blocks(block_ids: Sequence[int]) -> list[int]:
    return [NULL_BLOCK if block_id == NO_BLOCK else block_id + _NULL_BLOCKS for block_id in block_ids]


def usable_blocks(num_blocks: int) -> int:
    """How many of vLLM's blocks are ours."""
    return num_blocks - _NULL_BLOCKS


def blocks_to_ask_for(num_blocks: int) -> int:
    """How many blocks vLLM must have for `num_blocks` to be ours."""
    return num_blocks + _NULL_BLOCKS


SamplingOf = Callable[[LiveRequest, bool], VLLMSamplingParams]
"""(request, whether its prompt is scored) -> its parameters for vLLM; raises ValueError for what vLLM refuses."""


class VllmRequestRow(NamedTuple):
    """One of the step's requests, as it was when the step was handed out."""

    request: LiveRequest
    name: str
    """In vLLM; it may have another one by the time of the result."""
    samples: bool
    """A token is due."""


@dataclass(slots=True)
class PreparedStep:
    output: VLLMSchedulerOutput
    rows: list[VllmRequestRow] = field(default_factory=list)
    """One for each of the step's request_ids. One whose request was refused is not in `output`."""
    restored: list[tuple[NewRequestData, list[int]]] = field(default_factory=list)
    """Requests that the workers must know with these output tokens before the step."""


class StepBuilder:
    """Says to vLLM what our steps say. Tokens that steps under way are to sample are only counted: vLLM's workers put
    them in themselves.

    `introduces_resumed`: the workers take a resumed request as a new one with all of its tokens (vLLM's model runner
    V2); otherwise they must be given its output tokens first.
    """

    def __init__(
        self,
        sampling_of: SamplingOf,
        adapters: VLLMAdapters,
        groups: Sequence[KVGroup],
        *,
        introduces_resumed: bool,
        sends_tokens: bool,
    ) -> None:
        self._groups = groups
        self._sampling_of = sampling_of
        self._adapters = adapters
        self._introduces_resumed = introduces_resumed
        self._sends_tokens = sends_tokens
        """Workers of the first pipeline stages do not see what the last one samples."""
        self._previous: set[int] = set()
        """Requests of the step before."""

    def build(self, step: SchedulerOutput, table: VLLMRequestTable) -> PreparedStep:
        """Applies `step` to the table, in the order that SchedulerOutput prescribes, and says the same to vLLM."""
        fresh = {new.id for new in step.new_requests}
        table.drop(step.dropped_ids)
        for new in step.new_requests:
            table.add(new)
        grown, replaced = self._apply_blocks(step, table, fresh)
        prepared = PreparedStep(VLLMSchedulerOutput.make_empty())
        cached = CachedRequestData.make_empty()
        output = prepared.output
        for request_id, count, computed in zip(
            step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens, strict=True
        ):
            request = table[request_id]
            samples = computed + count == request.num_tokens
            if request_id in fresh or (request_id in replaced and self._introduces_resumed):
                self._introduce(prepared, cached, request, computed, count)
            elif request.refusal is None:
                whole = request_id in replaced
                if whole:
                    cached.resumed_req_ids.add(request.name)
                if whole or request_id not in self._previous:
                    cached.all_token_ids[request.name] = list(request.token_ids)
                blocks = [list(t) for t in request.block_ids] if whole else grown.get(request_id)
                self._continue(cached, request, computed, count, blocks)
            if request.refusal is None:
                output.num_scheduled_tokens[request.name] = count
                request.num_pending += samples
            prepared.rows.append(VllmRequestRow(request, request.name, samples and request.refusal is None))
        self._previous = set(step.request_ids)
        output.scheduled_cached_reqs = cached
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.finished_req_ids = table.take_finished()
        output.kv_cache_block_copies = self._block_copies(step, table) or None
        return prepared

    def _block_copies(self, step: SchedulerOutput, table: VLLMRequestTable) -> list[KVCacheBlockCopy]:
        """The step's, and the null block over each fresh block that a request with broken logits has held.

        Kernels multiply what lies behind a request's last token with zero, which does not make a NaN go away.
        """
        sources: dict[int, int] = {}  # by destination; vLLM reads all of them before it writes one
        tainted = table.tainted
        if tainted:
            computed = dict(zip(step.request_ids, step.num_computed_tokens, strict=True))
            fresh = {block for update in step.block_updates for block in to_vllm_blocks(update.block_ids)}
            for new in step.new_requests:
                for group, block_ids in zip(self._groups, new.block_ids, strict=True):
                    fresh.update(to_vllm_blocks(block_ids[-(-computed[new.id] // group.block_size) :]))
            sources = dict.fromkeys(sorted(tainted & fresh), NULL_BLOCK)
            tainted -= fresh
        for copy in step.block_copies:
            source, destination = to_vllm_blocks(copy)
            (tainted.add if source in tainted else tainted.discard)(destination)
            sources[destination] = sources.get(source, source)
        return [KVCacheBlockCopy(source, destination) for destination, source in sources.items()]

    def _apply_blocks(
        self, step: SchedulerOutput, table: VLLMRequestTable, fresh: set[int]
    ) -> tuple[dict[int, list[list[int]]], set[int]]:
        """Returns, for requests whose tables have grown, the new blocks of each group, and the ids of those that lost a
        block for another, which vLLM can only be told with whole tables."""
        grown: dict[int, list[list[int]]] = {}
        replaced = set()
        for request_id, group, start, block_ids in step.block_updates:
            tables, theirs = table[request_id].block_ids, to_vllm_blocks(block_ids)
            if start < len(tables[group]) and request_id not in fresh:
                if self._introduces_resumed and request_id not in replaced:
                    table.rename(request_id)
                replaced.add(request_id)
            grown.setdefault(request_id, [[] for _ in tables])[group] += theirs
            tables[group][start:] = theirs
        return grown, replaced

    def _introduce(
        self, prepared: PreparedStep, cached: CachedRequestData, request: LiveRequest, computed: int, count: int
    ) -> None:
        try:
            data = self._data_of(request, computed)
        except PenstockError as e:
            request.refusal = e
            return
        except (ValueError, VLLMValidationError) as e:
            request.refusal = InvalidRequestError(str(e))
            return
        output_token_ids = request.output_token_ids
        if self._introduces_resumed or not output_token_ids:
            prepared.output.scheduled_new_reqs.append(data)
            return
        prepared.restored.append((data, output_token_ids))
        cached.resumed_req_ids.add(request.name)
        cached.all_token_ids[request.name] = list(request.token_ids)
        self._continue(cached, request, computed, count, [list(table) for table in request.block_ids])

    def _data_of(self, request: LiveRequest, computed: int) -> NewRequestData:
        # a prompt is scored once, by the request that computes all of it; vLLM gives the scores when that is done
        scores = request.params.prompt_logprobs is not None and len(request.token_ids) == request.num_prompt_tokens
        if scores and 0 < computed < request.num_prompt_tokens - 1:
            raise StepFailedError("a step failed while the logprobs of this prompt were computed")
        return NewRequestData(
            req_id=request.name,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            mm_features=[],
            sampling_params=self._sampling_of(request, scores and not computed),
            pooling_params=None,
            block_ids=tuple(list(table) for table in request.block_ids),
            num_computed_tokens=computed,
            lora_request=self._adapters[request.adapter],
            prefill_token_ids=list(request.token_ids) if self._introduces_resumed else None,
        )

    def _continue(
        self,
        cached: CachedRequestData,
        request: LiveRequest,
        computed: int,
        count: int,
        new_blocks: list[list[int]] | None,
    ) -> None:
        cached.req_ids.append(request.name)
        cached.new_block_ids.append(None if new_blocks is None else tuple(new_blocks))
        cached.num_computed_tokens.append(computed)
        cached.num_output_tokens.append(request.num_tokens - request.num_prompt_tokens)
        if self._sends_tokens:
            cached.new_token_ids.append(request.token_ids[computed : computed + count])
