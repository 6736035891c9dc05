"""Drives a runner by hand: builds SchedulerOutputs from block tables chosen here, without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.contract.step import BlockUpdate, ModelRunnerOutput, NewRequest, SchedulerOutput
from penstock.kvcache import KVGroup

VOCAB_SIZE = 384
"""Of the models of `support.models`, which takes seconds to import: processes that only drive a model need not. More
than the tokenizer's 259 entries, as in many models of the field."""
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


@dataclass
class Tracked:
    """A live request: what it has computed and what it has got."""

    tokens: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    """Blocks, for each group of layers, and rows of states behind them."""
    computed: int = 0

    @property
    def blocks(self) -> list[int]:
        return self.tables[0]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


@dataclass
class Driver:
    """Blocks are handed out one after the other and never reused, block 0 is left alone. A step is submitted and
    collected at once."""

    runner: ModelRunner
    requests: dict[int, Tracked] = field(default_factory=dict)
    next_block: int = 1
    pending: SchedulerOutput = field(default_factory=SchedulerOutput)
    last: ModelRunnerOutput = field(default_factory=lambda: ModelRunnerOutput([]))

    def add(
        self,
        request_id: int,
        tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        seed: int = 0,
        blocks: list[int] | None = None,
        computed: int = 0,
    ) -> Tracked:
        """Announces a request with the next step. `blocks`: its table, of a model with one group of layers."""
        tables = [list(blocks)] if blocks is not None else [self._blocks(len(tokens), group) for group in self._groups]
        prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        request = Tracked(list(tokens), prompt, tables, computed)
        self.requests[request_id] = request
        block_ids = tuple(map(list, tables))
        self.pending.new_requests.append(NewRequest(request_id, list(tokens), prompt, block_ids, params, seed))
        return request

    def drop(self, request_id: int) -> None:
        del self.requests[request_id]
        self.pending.dropped_ids.append(request_id)

    def step(self, scheduled: dict[int, int] | None = None) -> ModelRunnerOutput:
        """Computes so many tokens of each of these requests; None: all that is left of all of them."""
        if scheduled is None:
            scheduled = {i: len(r.tokens) - r.computed for i, r in self.requests.items()}
        out, self.pending = self.pending, SchedulerOutput()
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            out.request_ids.append(request_id)
            out.num_scheduled_tokens.append(count)
            out.num_computed_tokens.append(request.computed)
            for group, table in enumerate(request.tables):
                missing = -(-(request.computed + count) // self._groups[group].block_size) - len(table)
                if missing > 0:
                    fresh = [self._block() for _ in range(missing)]
                    out.block_updates.append(BlockUpdate(request_id, group, len(table), fresh))
                    table += fresh
            request.computed += count
        out.total_num_scheduled_tokens = sum(scheduled.values())
        self.runner.submit(out)
        self.last = self.runner.collect()
        for request_id, sampled in zip(out.request_ids, self.last.sampled_token_ids, strict=True):
            self.requests[request_id].tokens += sampled
        return self.last

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, params: SamplingParams = GREEDY
    ) -> list[list[int]]:
        """All prompts in one step, then `count - 1` decode steps."""
        ids = range(len(self.requests), len(self.requests) + len(prompts))
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.add(request_id, prompt, params, seed=request_id)
        for _ in range(count):
            self.step()
        return [self.requests[i].output for i in ids]

    @property
    def _groups(self) -> tuple[KVGroup, ...]:
        return self.runner.info.tables

    def _blocks(self, tokens: int, group: KVGroup) -> list[int]:
        return [self._block() for _ in range(-(-tokens // group.block_size))]

    def _block(self) -> int:
        if self.next_block >= self.runner.info.num_blocks:
            raise AssertionError("the cache has no block left")
        self.next_block += 1
        return self.next_block - 1
