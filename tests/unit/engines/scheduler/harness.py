"""An engine core over the simulated runner, watched at the seam between them, and what it should answer."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    DownMessage,
    FinishReason,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StepOutputs,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.core import EngineCore
from penstock.engines.kit.guess_states import GuessStates
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.kvcache import BlockPool, HybridCacheManager, KVGroup, StateGroup
from support.simulated import generate

RAISE, NAN = 901, 902
"""Marker tokens: the step that computes one fails, or this request's logits are not numbers."""
FIRST, VOCAB = 1000, 1008
"""What is generated lies between these."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WatchedRunner(SimulatedRunner):
    """Keeps each step, and checks what every runner relies on: known ids, drops that come once, private blocks."""

    core: EngineCore
    before: Callable[[SchedulerOutput], None] | None = None
    after: Callable[[SchedulerOutput, ModelRunnerOutput], None] | None = None
    """More to check, before and after a step is computed."""

    def __init__(self, config: SimulatedConfig) -> None:
        super().__init__(config, sleep=lambda _: None, clock=lambda: 0.0)
        self.adapters.held["s"] = Path()
        self.steps: list[SchedulerOutput] = []
        self.num_computed = 0
        """Steps that came to a result."""
        self.known: set[int] = set()
        self.guess_states = GuessStates(self.info)
        self.problems: list[str] = []
        """An exception would look like a failed step: findings are kept until a test asks."""

    def submit(self, step: SchedulerOutput) -> None:
        self.steps.append(step)
        self._check(self._check_ids, step)
        self._check(self._check_counts, step)
        self._check(self._check_writes, step)
        self._check(self._check_states, step)
        self._check(self.before, step)
        super().submit(step)

    def collect(self) -> ModelRunnerOutput:
        step = self._under_way[0].step
        result = super().collect()
        self.guess_states.verified(step.request_ids, result)
        self.num_computed += 1
        self._check(self.after, step, result)
        return result

    def _check(self, check: Callable[..., None] | None, *args: object) -> None:
        if check is not None:
            try:
                check(*args)
            except Exception:
                self.problems.append(traceback.format_exc())

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    def _check_ids(self, step: SchedulerOutput) -> None:
        dropped, new = set(step.dropped_ids), {request.id for request in step.new_requests}
        self._require(len(dropped) == len(step.dropped_ids), f"dropped twice: {step.dropped_ids}")
        self._require(dropped <= self.known, f"dropped but never introduced: {dropped - self.known}")
        busy = {request_id for other in self._under_way for request_id in other.step.request_ids}
        self._require(not dropped & busy, f"dropped while a step is under way: {dropped & busy}")
        self.known -= dropped
        self._require(not new & self.known, f"introduced twice: {new & self.known}")
        self._require(len(new) == len(step.new_requests), "introduced twice in one step")
        self.known |= new
        self._require(set(step.request_ids) <= self.known, f"{step.request_ids} run, {self.known} are known")
        updated = {update.request_id for update in step.block_updates}
        self._require(updated <= set(step.request_ids) - new, "blocks for a request that does not run, or is new")

    def _check_counts(self, step: SchedulerOutput) -> None:
        config = self.core.scheduler.config
        self._require(len(step.request_ids) == len(set(step.request_ids)), "a request is in the step twice")
        self._require(len(step.request_ids) <= config.max_num_seqs, "more requests than seats")
        self._require(min(step.num_scheduled_tokens) >= 1, "a request with nothing to compute")
        self._require(sum(step.num_scheduled_tokens) == step.total_num_scheduled_tokens, "the total is wrong")
        self._require(step.total_num_scheduled_tokens <= config.max_num_batched_tokens, "over the token budget")
        busy = {request_id for other in self._under_way for request_id in other.step.drafts}
        self._require(not busy & set(step.request_ids), "nobody knows what the step before will find out")
        self._require(not self._sampling() & set(step.drafts), "guesses behind a token that is not known")

    def _check_states(self, step: SchedulerOutput) -> None:
        """There are rows for the states behind guesses, and no checkpoint is among them."""
        if self.info.states is None:
            return
        self.guess_states.forget(step)
        self.guess_states.take(step.request_ids, step.drafts)
        size = self.info.states.table.block_size
        for request_id, start, count in zip(
            step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            crosses = start // size != (start + count - 1) // size
            self._require(request_id not in step.drafts or not crosses, "guesses on both sides of a checkpoint")

    def _sampling(self) -> set[int]:
        """Ids for which steps under way sample."""
        known = dict(self._states)
        ids = set()
        for other in self._under_way:
            known |= other.new
            step = other.step
            for request_id, start, count in zip(
                step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
            ):
                if start + count >= len(known[request_id].token_ids):
                    ids.add(request_id)
        return ids

    def _check_writes(self, step: SchedulerOutput) -> None:
        """Each block that is written has one holder, and nobody can find it."""
        kv, groups = self.core.scheduler.kv, self.info.tables
        pools = [kv.pool] * len(self.info.kv_groups) + ([kv.rows] if isinstance(kv, HybridCacheManager) else [])
        writers: dict[tuple[BlockPool, int], int] = {}
        for run, start, count in zip(
            self.core.scheduler.under_way[-1].runs, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            tables, name = run.tables, run.request.id
            for group, pool, table in zip(groups, pools, tables.block_ids, strict=True):
                size = group.block_size
                for block_id in table[start // size : (start + count - 1) // size + 1]:
                    writer = writers.setdefault((pool, block_id), name)
                    self._require(writer == name, f"{writer} and {name} both write block {block_id}")
                    self._require(pool.is_writable(block_id), f"{name} writes shared or cached block {block_id}")
                self._require(len(table) * size >= start + count, f"{name} writes beyond its blocks")

    def reset(self) -> None:
        super().reset()
        self.known.clear()
        self.guess_states.reset()


class CoreRig:
    """An engine core under test: messages in, what each request has got so far out."""

    core: EngineCore | AutonomousCore

    def __init__(self) -> None:
        self.clock = Clock()
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, RequestOutput] = {}
        self._next_id = 1

    def request(
        self,
        prompt: Sequence[int],
        n: int = 1,
        *,
        params: SamplingParams | PoolingParams | None = None,
        max_tokens: int = 4,
        priority: int = 0,
        background: bool = False,
        tenant: str = "",
        salt: str = "",
        adapter: str = "",
        retention: int = 0,
        deadline: float | None = None,
        arrival_time: float | None = None,
    ) -> AddRequest:
        ids = tuple(range(self._next_id, self._next_id + n))
        self._next_id += n
        return AddRequest(
            ids=ids,
            prompt_token_ids=list(prompt),
            params=params or greedy(max_tokens),
            arrival_time=self.clock.now if arrival_time is None else arrival_time,
            deadline=deadline,
            priority=priority,
            background=background,
            tenant=tenant,
            cache_salt=salt,
            cache_retention=retention,
            adapter=adapter,
        )

    def step(self, *messages: DownMessage) -> StepOutputs:
        """One iteration; checks its books and that nobody gets anything after the end."""
        result = self.core.step(messages)
        self.core.check_integrity()
        for output in result.outputs:
            assert output.id not in self.ended, f"{output.id} got {output} after its end"
            self.tokens.setdefault(output.id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended[output.id] = output
        return result

    def run(self, *messages: DownMessage, limit: int = 2000) -> int:
        """Steps until nothing is left to do: the number of steps."""
        self.step(*messages)
        for count in range(1, limit):
            if not self.core.has_work:
                return count
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def abort(self, *ids: int) -> AbortRequests:
        return AbortRequests(list(ids))


class Rig(CoreRig):
    """Our scheduler over a runner that is watched."""

    core: EngineCore

    def __init__(self, config: SchedulerConfig, model: SimulatedConfig) -> None:
        super().__init__()
        self.runner = WatchedRunner(model)
        self.core = EngineCore(self.runner, config, self.clock)
        self.runner.core = self.core
        self.scheduler = self.core.scheduler

    def step(self, *messages: DownMessage) -> StepOutputs:
        result = super().step(*messages)
        assert not self.runner.problems, self.runner.problems
        return result

    @property
    def last(self) -> SchedulerOutput:
        """What the runner was asked for most recently."""
        return self.runner.steps[-1]

    def counts(self) -> dict[int, int]:
        """Tokens of each request in the last step."""
        return dict(zip(self.last.request_ids, self.last.num_scheduled_tokens, strict=True))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def make_rig(
    num_blocks: int = 16,
    block_size: int = 4,
    *,
    groups: Sequence[KVGroup] = (),
    states: StateGroup | None = None,
    eos: tuple[int, ...] = (),
    vocab_size: int = VOCAB,
    **config: object,
) -> Rig:
    """A rig with room to spare and one step at a time, unless told otherwise. `config` is SchedulerConfig's."""
    limits: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "steps_in_flight": 1,
        "itl_target_ms": 0,
    }
    model = SimulatedConfig(
        vocab_size=vocab_size,
        first_token_id=FIRST,
        max_model_len=1000,
        block_size=block_size,
        kv_groups=tuple(groups),
        states=states,
        num_blocks=num_blocks,
        eos_token_ids=eos,
        max_steps_in_flight=3,
        faults=f"raise={RAISE},nan={NAN}",
    )
    return Rig(SchedulerConfig(**limits | config), model)  # type: ignore[arg-type]


def alone(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    index: int = 0,
    adapter: str = "",
    eos: Sequence[int] = (),
    groups: Sequence[KVGroup] = (KVGroup(1),),
    vocab_size: int = VOCAB,
) -> tuple[list[int], FinishReason, int | None]:
    """Output, finish reason and stop token of a request's sample `index` that has the model to itself."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    info = ModelInfo(
        vocab_size=vocab_size, max_model_len=1, kv_groups=tuple(groups), num_blocks=1, eos_token_ids=(), runner=""
    )
    seed = (params.seed or 0) + index
    tokens = generate(info, prompt, params.max_tokens, first_token_id=FIRST, adapter=adapter, params=params, seed=seed)
    for count, token in enumerate(tokens, 1):
        if token in stops and count > params.min_tokens:
            return tokens[:count], FinishReason.STOP, None if token in eos else token
    return tokens, FinishReason.LENGTH, None
