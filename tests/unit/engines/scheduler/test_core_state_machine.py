"""The whole engine core against the properties that hold whatever arrives, fails, or is given up, in any order.

The simulated runner reads its history back through the block tables, so one property stands above the others: what a
request gets is what it would get alone, computed in one piece, one step at a time. The tests' numbering of the
properties (P1..P18) is explained at each check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log2

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    DownMessage,
    FinishReason,
    PoolingParams,
    RequestOutput,
    SamplingParams,
)
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import ContextLengthError, DeadlineExceededError, QueueFullError
from penstock.engines.scheduler.queues import Policy
from penstock.engines.simulated.runner import _vector
from penstock.kvcache import KVGroup, StateGroup
from support.simulated import digests
from unit.engines.scheduler.harness import FIRST, NAN, RAISE, Rig, alone, greedy, make_rig
from unit.kvcache.profiles import MACHINE_TIMEOUT, machine_settings

pytestmark = MACHINE_TIMEOUT

MAX_SAMPLES = 4
NEVER_FULL = 100_000
"""More requests, and more tokens, than a run of the machine can send."""
Prefix = tuple[str, str, tuple[int, ...]]
GROUPS = [
    (KVGroup(2),),
    (KVGroup(3),),
    (KVGroup(4),),
    (KVGroup(2), KVGroup(4)),
    (KVGroup(4), KVGroup(2)),
    (KVGroup(2), KVGroup(2, 5)),
    (KVGroup(4), KVGroup(2, 3)),
    (KVGroup(2, 7), KVGroup(4)),
    (KVGroup(2, 4),),
]
STATEFUL = [((KVGroup(2),), 2), ((KVGroup(2),), 8), ((KVGroup(3),), 3), ((KVGroup(2), KVGroup(4)), 16)]
"""Of models with recurrent layers: the groups of the others, and the interval of checkpoints."""


@dataclass
class Expected:
    """What the model of the engine knows of one sample."""

    message: AddRequest
    tokens: list[int]
    reason: FinishReason
    stop_token_id: int | None
    pooled: list[float] | None = None
    aborted: bool = False
    """An abort has been sent: it may end that way."""
    got: list[int] = field(default_factory=list)


class EngineMachine(RuleBasedStateMachine):
    rig: Rig

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[int, Expected] = {}
        self.inbox: list[DownMessage] = []
        self.histories: list[list[int]] = [[0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1]]
        self.had_seat: set[int] = set()
        """Running after the step before."""
        self.short_of_rows = False
        self.published: set[Prefix] = set()
        """Prefixes that a step which succeeded has computed: they may be in the cache."""

    @initialize(
        groups=st.sampled_from(GROUPS),
        num_blocks=st.integers(4, 32),
        seats=st.integers(1, 6),
        spare_budget=st.sampled_from([0, 1, 3, 8, 30]),
        depth=st.integers(1, 3),
        speculative=st.sampled_from(["off", "ngram"]),
        itl=st.sampled_from([0, 0, 8]),
        vocab=st.sampled_from([2, 8]),
        policy=st.sampled_from(Policy),
        caching=st.sampled_from([True, True, False]),
        ageing=st.sampled_from([0.0, 1.0, 10.0]),
        queue=st.sampled_from([NEVER_FULL] * 4 + [0, 2, 5]),
        queued_tokens=st.sampled_from([NEVER_FULL] * 5 + [40]),
        eos=st.sampled_from([(), (FIRST + 7,), (FIRST + 6, FIRST + 1)]),
    )
    def start(
        self,
        groups: tuple[KVGroup, ...],
        num_blocks: int,
        seats: int,
        spare_budget: int,
        depth: int,
        speculative: str,
        itl: int,
        vocab: int,
        policy: Policy,
        caching: bool,
        ageing: float,
        queue: int,
        queued_tokens: int,
        eos: tuple[int, ...],
    ) -> None:
        self.eos, self.groups, self.vocab_size = eos, groups, FIRST + vocab
        self.rig = make_rig(
            num_blocks,
            groups=groups,
            eos=eos,
            vocab_size=self.vocab_size,
            max_num_seqs=seats,
            max_num_batched_tokens=seats + spare_budget,
            steps_in_flight=depth,
            speculative=speculative,
            itl_target_ms=itl,
            policy=policy,
            ageing_seconds=ageing,
            max_queued_requests=queue,
            max_queued_tokens=queued_tokens,
            enable_prefix_caching=caching,
        )
        self._watch()

    def _watch(self) -> None:
        self.rig.runner.before, self.rig.runner.after = self._before_execution, self._after_execution

    # -- rules -----------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        n=st.sampled_from([1, 1, 1, 2, 3, MAX_SAMPLES]),
        max_tokens=st.integers(1, 16),
        min_tokens=st.integers(0, 3),
        stop=st.sampled_from([(), (), (FIRST + 3,), (FIRST, FIRST + 7)]),
        ignore_eos=st.booleans(),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        priority=st.integers(-2, 2),
        background=st.sampled_from([False, False, True]),
        tenant=st.sampled_from(["a", "b", "c"]),
        salt=st.sampled_from([""] * 5 + ["s"]),
        adapter=st.sampled_from([""] * 9 + ["s"]),
        retention=st.sampled_from([0] * 4 + [1, 10]),
        patience=st.sampled_from([None] * 8 + [0.0, 2.0, 20.0]),
        marker=st.sampled_from([None] * 14 + [NAN, RAISE, RAISE]),
        prompt_logprobs=st.sampled_from([None] * 6 + [1]),
    )
    def submit(
        self,
        data: st.DataObject,
        n: int,
        max_tokens: int,
        min_tokens: int,
        stop: tuple[int, ...],
        ignore_eos: bool,
        temperature: float,
        priority: int,
        background: bool,
        tenant: str,
        salt: str,
        adapter: str,
        retention: int,
        patience: float | None,
        marker: int | None,
        prompt_logprobs: int | None,
    ) -> None:
        prompt = self._prompt(data)
        if marker is not None:
            prompt = [*prompt, marker, 1]
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=5,
            prompt_logprobs=prompt_logprobs,
        )
        self._send(
            self.rig.request(
                prompt,
                n,
                params=params,
                priority=priority,
                background=background,
                tenant=tenant,
                salt=salt,
                adapter=adapter,
                retention=retention,
                deadline=None if patience is None else self.rig.clock.now + patience,
            )
        )

    @rule(
        data=st.data(), count=st.integers(2, 5), max_tokens=st.integers(4, 24), tenant=st.sampled_from(["a", "b", "c"])
    )
    def burst(self, data: st.DataObject, count: int, max_tokens: int, tenant: str) -> None:
        """Plain requests that want more blocks than there are, and go on long enough to feel it."""
        for priority in range(count):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
            self._send(self.rig.request(self._prompt(data), params=params, tenant=tenant, priority=priority % 3))

    @rule(data=st.data(), marker=st.sampled_from([None] * 6 + [NAN, RAISE]), salt=st.sampled_from(["", "s"]))
    def embed(self, data: st.DataObject, marker: int | None, salt: str) -> None:
        """A vector is wanted."""
        prompt = [*self._prompt(data), *([] if marker is None else [marker])]
        self._send(self.rig.request(prompt, params=PoolingParams(normalize=False), salt=salt))

    @rule(data=st.data(), count=st.integers(2, 4))
    def twins(self, data: st.DataObject, count: int) -> None:
        """The same prompt several times at once."""
        prompt = self._prompt(data) * 2
        for _ in range(count):
            self._send(self.rig.request(prompt, params=greedy(5)))

    def _prompt(self, data: st.DataObject) -> list[int]:
        """A beginning that others have had before it, and something of its own."""
        known = data.draw(st.sampled_from(self.histories))
        own = data.draw(st.lists(st.integers(0, 1), max_size=4))
        return known[: data.draw(st.integers(0, len(known)))] + own or [0]

    def _send(self, message: AddRequest) -> None:
        prompt, params = message.prompt_token_ids, message.params
        for index, request_id in enumerate(message.ids):
            if isinstance(params, PoolingParams):
                pooled = _vector(digests(prompt, message.adapter, self.groups)[-1])
                self.samples[request_id] = Expected(message, [], FinishReason.STOP, None, pooled)
                continue
            expected = alone(
                prompt,
                params,
                index=index,
                adapter=message.adapter,
                eos=self.eos,
                groups=self.groups,
                vocab_size=self.vocab_size,
            )
            self.samples[request_id] = Expected(message, *expected)
        self.inbox.append(message)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any id in any state: waiting, following, running, preempted, forked, ended, in the inbox, or unknown."""
        request_id = data.draw(st.sampled_from([*self.samples, 10_000]))
        if request_id in self.samples:
            self.samples[request_id].aborted = True
        self.inbox.append(self.rig.abort(request_id, request_id))

    @rule(seconds=st.sampled_from([0.1] * 5 + [3.0, 30.0]))
    def jump(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule(really=st.sampled_from([True, False, False, False]))
    def clear_cache(self, really: bool) -> None:
        if really:
            self.rig.scheduler.kv.pool.clear_cache()

    @rule(count=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    # -- one step and what must hold after it ----------------------------------------------------------------

    def _step(self) -> None:
        rig, scheduler = self.rig, self.rig.scheduler
        messages, self.inbox = self.inbox, []
        submitted, was_under_way, now = len(rig.runner.steps), len(scheduler.under_way), rig.clock.now
        result = rig.step(*messages)  # P1, P2, P3, P8 and the second half of P6 are checked there
        for output in result.outputs:
            self._check_output(output)
        requests = scheduler.intake.requests
        live = set(requests)
        sent = {i for m in messages if isinstance(m, AddRequest) for i in m.ids}
        assert sent - live <= set(rig.ended), "P6: neither live nor ended"
        given_up = {i for m in messages if isinstance(m, AbortRequests) for i in m.ids}
        assert not given_up & live, "P17: it goes on after an abort"
        assert was_under_way or len(rig.runner.steps) > submitted or not live, "P9: requests, and nothing was computed"
        overdue = [i for i in live if (self.samples[i].message.deadline or 1e9) <= now]
        assert not overdue, f"P16: {overdue} are over their deadline"
        config = scheduler.config
        bound = config.max_num_seqs + max(config.max_queued_requests, MAX_SAMPLES - 1)
        assert len(live) <= bound, "P15: more requests than seats and queue"
        self.had_seat = {run.request.id for run in scheduler.running.runs}
        self._check_preemptions()
        self._check_stats()

    def _before_execution(self, step: SchedulerOutput) -> None:
        """The step is decided, not computed."""
        scheduler, rig = self.rig.scheduler, self.rig
        requests = scheduler.intake.requests
        for new in step.new_requests:
            self._check_hit(step, new.id)
        admitted = [requests[new.id] for new in step.new_requests if new.id not in self.had_seat]
        waiting = list(scheduler.intake.waiting)
        computed = {requests[request_id].background for request_id in step.request_ids if request_id in requests}
        if True in computed and (False in computed or not scheduler.trials) and scheduler.running.has_others:
            rig.runner.problems.append("P19: something in the background is computed beside others")
        in_order = scheduler.config.policy is not Policy.FAIR
        if in_order and admitted and waiting and max(r.key for r in admitted) > min(r.key for r in waiting):
            rig.runner.problems.append("P11: a request that is behind in the order was admitted earlier")

    def _check_hit(self, step: SchedulerOutput, request_id: int) -> None:
        """P13: a hit has the same salt, adapter and tokens, and was computed by a step that succeeded."""
        index = step.request_ids.index(request_id)
        num_cached, size = step.num_computed_tokens[index], self.groups[0].block_size
        request = self.rig.scheduler.intake.requests[request_id]
        message = self.samples[request_id].message
        problems = self.rig.runner.problems
        if request.num_cached_tokens and (request.scores_prompt or not self.rig.scheduler.kv.enable_prefix_caching):
            problems.append("P13: read from a cache that it must not read")
        for end in range(size, num_cached + 1, size):
            if self._prefix(message, request.token_ids, end) not in self.published:
                problems.append(
                    f"P13: {request_id} found {num_cached} tokens, nobody computed the first {end}: {request.token_ids}"
                )

    def _prefix(self, message: AddRequest, token_ids: list[int], end: int) -> Prefix:
        return message.cache_salt, message.adapter, tuple(token_ids[:end])

    def _after_execution(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The step has succeeded: what it computed may be found from now on."""
        size, requests = self.groups[0].block_size, self.rig.scheduler.intake.requests
        self.rig.clock.now += 0.002 + 0.0005 * step.total_num_scheduled_tokens
        for request_id, start, count, tokens in zip(
            step.request_ids, step.num_computed_tokens, step.num_scheduled_tokens, result.sampled_token_ids, strict=True
        ):
            if request_id in requests and request_id not in result.failed:
                known = requests[request_id].token_ids + tokens
                last = start + (len(tokens) if request_id in step.drafts else count)
                for end in range((start // size + 1) * size, last + 1, size):
                    self.published.add(self._prefix(self.samples[request_id].message, known, end))

    def _check_output(self, output: RequestOutput) -> None:
        expected = self.samples[output.id]
        expected.got += output.token_ids
        count = len(expected.got)
        assert expected.got == expected.tokens[:count], "P7: other tokens than alone"
        if output.finish_reason is None:
            assert count < len(expected.tokens), "P7: it has all of its tokens, and goes on"
            return
        history = expected.message.prompt_token_ids + expected.got
        self.histories = [*self.histories[-5:], [token for token in history if token < NAN and token < RAISE]]
        if output.finish_reason is FinishReason.ERROR:
            self._check_error(output, expected)
        elif output.finish_reason is FinishReason.ABORT:
            assert expected.aborted, "P17: aborted, and nobody asked for it"
        else:
            assert expected.got == expected.tokens, "P7: an early end"
            assert output.pooled == expected.pooled, "P18: another vector than alone"
            assert (output.finish_reason, output.stop_token_id) == (expected.reason, expected.stop_token_id)

    def _check_error(self, output: RequestOutput, expected: Expected) -> None:
        assert output.error is not None
        message, config, code = expected.message, self.rig.scheduler.config, output.error.code
        if code == DeadlineExceededError.code:
            assert message.deadline is not None
            assert message.deadline <= self.rig.clock.now, "P16: ended before its time"
        elif code == ContextLengthError.code:
            total = len(message.prompt_token_ids)
            total += 0 if isinstance(message.params, PoolingParams) else message.params.max_tokens
            needed = sum(ceil(total / group.block_size) for group in self.rig.core.info.kv_groups)
            assert needed > self.rig.scheduler.kv.pool.num_blocks, "refused, but it would fit"
        elif code == QueueFullError.code:
            assert min(config.max_queued_requests, config.max_queued_tokens) < NEVER_FULL
            assert output.error.retry_after is not None
            assert 1 <= output.error.retry_after <= 60
        elif code == "numerical_error":
            assert NAN in message.prompt_token_ids, "P14: ended by a neighbour's numerical error"
        else:
            assert code == "step_failed"
            assert RAISE in message.prompt_token_ids, "P14: ended by a neighbour's failure"

    def _check_preemptions(self) -> None:
        """P10. Each preemption doubles what must stay free at the next admission. After as many as the pool's size has
        doublings a request starts only when nobody else runs, and from then on only one that comes later and goes
        before it can take its blocks: under `fcfs` samples whose leader had taken their place in the order. (Rows of
        states are not reserved: runners have as many as their seats need.)"""
        scheduler = self.rig.scheduler
        if self.short_of_rows:
            return
        doublings = ceil(log2(scheduler.kv.pool.num_blocks))
        for request in scheduler.intake.requests.values():
            ahead = len(self.samples)
            if scheduler.config.policy is Policy.FCFS:
                ahead = sum(i < request.id and i != sample.message.ids[0] for i, sample in self.samples.items())
            assert request.num_preemptions <= doublings + ahead, "P10: preempted again and again"

    def _check_stats(self) -> None:
        scheduler = self.rig.scheduler
        stats = scheduler.stats()
        live = len(scheduler.intake.requests)
        assert stats.num_running + stats.num_waiting == live
        assert stats.generation_tokens == sum(len(sample.got) for sample in self.samples.values())
        assert stats.admitted == sum(stats.finished.values()) + live, "P4: admitted, and neither live nor finished"
        assert stats.accepted_tokens <= stats.draft_tokens

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(5000):
            if not self.inbox and not self.rig.core.has_work:
                break
            self._step()
        self._check_idle()

    def _check_idle(self) -> None:
        """P4, P6: everybody has had an end, and nothing is left of anybody."""
        rig, scheduler = self.rig, self.rig.scheduler
        assert set(rig.ended) == set(self.samples)
        stats = scheduler.stats()
        note(f"{stats.preemptions} preemptions, {stats.step_failures} failures, {stats.accepted_tokens} right guesses")
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        rig.runner.before = rig.runner.after = None
        last = rig.request([0], max_tokens=1)
        rig.run(last)  # its first step tells the runner of everybody who has gone
        assert rig.runner.known == {*last.ids}


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = machine_settings(200, 30)


class HybridEngineMachine(EngineMachine):
    """With a model that has recurrent layers, whose guesses cannot be verified."""

    @initialize(
        stateful=st.sampled_from(STATEFUL),
        num_blocks=st.integers(6, 32),
        seats=st.integers(1, 6),
        spare_budget=st.sampled_from([0, 3, 8, 30]),
        depth=st.integers(1, 3),
        spare_rows=st.sampled_from([0, 1, 5, 100, 100]),
        speculative=st.sampled_from(["off", "ngram", "ngram"]),
        vocab=st.sampled_from([2, 8]),
        policy=st.sampled_from(Policy),
        caching=st.sampled_from([True, True, False]),
    )
    def start(  # type: ignore[override]
        self,
        stateful: tuple[tuple[KVGroup, ...], int],
        num_blocks: int,
        seats: int,
        spare_budget: int,
        depth: int,
        spare_rows: int,
        speculative: str,
        vocab: int,
        policy: Policy,
        caching: bool,
    ) -> None:
        groups, interval = stateful
        self.eos, self.groups, self.vocab_size = (), (*groups, KVGroup(1, 2)), FIRST + vocab
        self.short_of_rows = spare_rows < 100
        self.rig = make_rig(
            num_blocks,
            groups=groups,
            states=StateGroup(interval, 2 + 2 * depth + spare_rows, max(group.block_size for group in groups)),
            vocab_size=self.vocab_size,
            max_num_seqs=seats,
            max_num_batched_tokens=seats + spare_budget,
            steps_in_flight=depth,
            speculative=speculative,
            policy=policy,
            enable_prefix_caching=caching,
        )
        self._watch()


TestHybridEngineMachine = HybridEngineMachine.TestCase
TestHybridEngineMachine.settings = machine_settings(60, 30)
