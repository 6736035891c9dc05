"""Facts and results in our words: a loaded model's ends of sequence, the tokens that its KV cache holds, and the output
of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from penstock.engines.contract.messages import TokenLogprobs
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import EngineError, NumericalError
from penstock.engines.formats.model_files import eos_token_ids, ids_of_vocabulary
from penstock.engines.vllm.step import VllmRequestRow, VLLMRequestTable, usable_blocks
from penstock.kvcache import KVGroup


def end_token_ids(model_config: Any, model_dir: Path) -> tuple[int, ...]:
    """Those that the model's files name, and those of vLLM's own settings (`generation_config`, `hf_overrides`)."""
    vocab_size = model_config.get_vocab_size()
    generation = model_config.try_get_generation_config().get("eos_token_id")
    settings = getattr(model_config.hf_text_config, "eos_token_id", None)
    return ids_of_vocabulary(vocab_size, generation, settings, list(eos_token_ids(model_dir, vocab_size)))


def description(version: str, settings: Any, scheduler: str = "") -> str:
    devices = settings.parallel_config.world_size
    return f"vllm {version}, {current_platform.device_type} x{devices}, {number_types(settings)}{scheduler}"


def number_types(settings: Any) -> str:
    """`ModelInfo.numerics`"""
    dtype = str(settings.model_config.dtype).removeprefix("torch.")
    return f"{dtype}, kv {settings.cache_config.cache_dtype}"


def kv_groups(cache: Any) -> tuple[KVGroup, ...]:
    """Of a KVCacheConfig that `supported.check_cache` has let in. Like ours, vLLM's groups take their blocks from one
    pool, and a window is counted with the token itself."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return tuple(
        KVGroup(spec.block_size, spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0) for spec in specs
    )


@dataclass(frozen=True)
class Capacity:
    """A pool of blocks, whose number says little where several groups of layers draw from it: in blocks of tokens."""

    block_size: int
    num_blocks: int
    """Blocks of `block_size` tokens that long requests could have together."""
    pool_blocks: int
    """vLLM's, without the null block."""
    longest: int
    """Tokens of the longest request that it can run."""

    def in_blocks(self, pool_blocks: int) -> int:
        return pool_blocks * self.num_blocks // self.pool_blocks


def capacity(settings: Any, cache: Any) -> Capacity:
    """A request takes blocks for each group of layers: one for each `block_size` tokens where attention is full, a
    bounded number where it has a window, one for a recurrent state. With one group of full attention it all adds up
    simply; otherwise blocks of tokens are counted as a request of the greatest length would take them.
    """
    pool = usable_blocks(cache.num_blocks)
    block_size = settings.cache_config.block_size
    longest = settings.model_config.max_model_len  # vLLM has seen to it that this fits
    drafts = settings.speculative_config
    if drafts is not None and _blocks_needed(settings, cache, longest + drafts.num_speculative_tokens) > pool:
        longest -= drafts.num_speculative_tokens  # room for drafts behind the last token
    whole = -(-longest // block_size)
    num_blocks = pool * whole // _blocks_needed(settings, cache, longest)
    return Capacity(block_size, max(whole, num_blocks), pool, longest)


def _blocks_needed(settings: Any, cache: Any, length: int) -> int:
    """Of the pool, by one request of this length. vLLM asks the configuration for the length."""
    model = settings.model_config
    limit = model.max_model_len
    model.max_model_len = length
    try:
        needed: int = round(cache.num_blocks / get_max_concurrency_for_kv_cache_config(settings, cache))
        return needed
    finally:
        model.max_model_len = limit


NOT_FINITE = "the model's logits are not finite"


def read_output(
    step: SchedulerOutput, rows: Sequence[VllmRequestRow], table: VLLMRequestTable, theirs: Any
) -> ModelRunnerOutput:
    """`theirs` is vLLM's; its requests come in an order of its own. Appends the sampled tokens to their requests."""
    output = ModelRunnerOutput([[] for _ in step.request_ids])
    broken = theirs.num_nans_in_logits or {}
    for i, (request_id, (request, name, samples)) in enumerate(zip(step.request_ids, rows, strict=True)):
        if request.refusal is not None:
            output.failed[request_id] = request.refusal
            continue
        request.num_pending -= samples
        index = theirs.req_id_to_index[name]
        if broken.get(name):
            output.failed[request_id] = NumericalError(NOT_FINITE)
            table.taint(request)
            continue
        scored = theirs.prompt_logprobs_dict.get(name)
        if scored is not None:
            entries = token_logprobs(scored[0], scored[1], scored[2], request.params.prompt_logprobs or 0)
            output.prompt_logprobs[request_id] = entries
        if not samples:
            continue
        if request.grammar is not None and request.grammar.failure is not None:
            output.failed[request_id] = request.grammar.failure
            continue
        tokens = [int(token) for token in theirs.sampled_token_ids[index]]
        if len(tokens) != 1:
            raise EngineError(f"vLLM sampled {len(tokens)} tokens for a request that was due one")
        if request.params.logprobs is not None:
            sampled = theirs.logprobs.slice_request(index, 1)
            entries = token_logprobs(sampled[0], sampled[1], sampled[2], request.params.logprobs)
            if not math.isfinite(entries[0].logprob):
                output.failed[request_id] = NumericalError(NOT_FINITE)
                table.taint(request)
                continue
            output.logprobs[request_id] = entries
        output.sampled_token_ids[i] = tokens
        request.token_ids += tokens
    return output


def token_logprobs(token_ids: Any, logprobs: Any, ranks: Any, top: int) -> list[TokenLogprobs]:
    """Rows of vLLM's: first the token itself, then the likeliest ones, of which the batch may have asked for more."""
    return [
        TokenLogprobs(ids[0], values[0], rank, _possible(ids[1 : top + 1], values[1 : top + 1]))
        for ids, values, rank in zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    ]


def _possible(token_ids: list[int], logprobs: list[float]) -> list[tuple[int, float]]:
    """Without those that a grammar forbids: there vLLM tells of the distribution that is left."""
    return [(token_id, value) for token_id, value in zip(token_ids, logprobs, strict=True) if value > -math.inf]
