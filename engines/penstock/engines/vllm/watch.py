"""Between vLLM's core and its scheduler: what each step was like, and the end of requests with broken logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from penstock.engines.vllm.requests import NULL_BLOCK


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
