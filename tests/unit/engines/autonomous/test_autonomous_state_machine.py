"""The admission queue in front of a batcher, against what holds whatever arrives, ends or is given up, in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from penstock.engines.contract.messages import AddRequest, DownMessage, FinishReason, RequestOutput
from penstock.engines.scheduler.queues import Policy
from penstock.engines.scheduler.request import Request
from unit.engines.autonomous.rig import AutonomousRig, make_rig
from unit.engines.scheduler.harness import NAN, RAISE, alone, greedy
from unit.kvcache.profiles import MACHINE_TIMEOUT, machine_settings

pytestmark = MACHINE_TIMEOUT


@dataclass
class Expected:
    message: AddRequest
    tokens: list[int]
    reason: FinishReason
    aborted: bool = False
    got: list[int] = field(default_factory=list)


class AdmissionMachine(RuleBasedStateMachine):
    rig: AutonomousRig

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[int, Expected] = {}
        self.inbox: list[DownMessage] = []
        self.num_started = 0

    @initialize(
        num_blocks=st.integers(4, 32),
        seats=st.integers(1, 6),
        budget=st.sampled_from([8, 12, 64]),
        policy=st.sampled_from(Policy),
        caching=st.booleans(),
        queue=st.sampled_from([100] * 3 + [0, 3]),
        queued_tokens=st.sampled_from([1000] * 4 + [40]),
        abort_after=st.sampled_from([0, 1, 3, 10]),
    )
    def start(
        self,
        num_blocks: int,
        seats: int,
        budget: int,
        policy: Policy,
        caching: bool,
        queue: int,
        queued_tokens: int,
        abort_after: int,
    ) -> None:
        self.rig = make_rig(
            num_blocks,
            abort_after=abort_after,
            budget=budget,
            max_num_seqs=seats,
            policy=policy,
            max_queued_requests=queue,
            max_queued_tokens=queued_tokens,
            enable_prefix_caching=caching,
        )

    # -- rules -----------------------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        max_tokens=st.integers(1, 24),
        priority=st.integers(-2, 2),
        tenant=st.sampled_from(["a", "b", "c"]),
        patience=st.sampled_from([None] * 6 + [0.0, 2.0, 20.0]),
        marker=st.sampled_from([None] * 20 + [NAN, NAN, RAISE]),
    )
    def submit(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        priority: int,
        tenant: str,
        patience: float | None,
        marker: int | None,
    ) -> None:
        message = self.rig.request(
            prompt if marker is None else [*prompt, marker],
            n,
            params=greedy(max_tokens),
            priority=priority,
            tenant=tenant,
            deadline=None if patience is None else self.rig.clock.now + patience,
        )
        tokens, reason, _ = alone(message.prompt_token_ids, message.params)
        self.samples.update((i, Expected(message, tokens, reason)) for i in message.ids)
        self.inbox.append(message)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any id in any state: waiting, running, given up, ended, in the inbox, or unknown."""
        request_id = data.draw(st.sampled_from([*self.samples, 10_000]))
        if request_id in self.samples:
            self.samples[request_id].aborted = True
        self.inbox.append(self.rig.abort(request_id, request_id))

    @rule(seconds=st.sampled_from([0.1] * 5 + [3.0, 30.0]))
    def jump(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule(count=st.sampled_from([1, 1, 2, 5, 20]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    # -- one step and what must hold after it ----------------------------------------------------------------

    def _step(self) -> None:
        rig, core = self.rig, self.rig.core
        if core.broken:
            return
        messages, self.inbox = self.inbox, []
        free_before, taken_before = rig.batcher.num_free_blocks, core.seats.num_taken
        for output in rig.step(*messages).outputs:
            self._check_output(output)
        sent = {i for m in messages if isinstance(m, AddRequest) for i in m.ids}
        assert sent - core.intake.requests.keys() <= rig.ended.keys(), "neither live nor ended"
        assert not core.intake.requests.keys() & rig.ended.keys(), "live after its end"
        overdue = [
            r.id for r in core.intake.requests.values() if r.deadline is not None and r.deadline <= rig.clock.now
        ]
        assert core.broken or not overdue, f"{overdue} are over their deadline"
        started = rig.batcher.started[self.num_started :]
        self.num_started += len(started)
        if len(started) > (0 if taken_before else 1):
            blocks = sum(-(-len(request.prompt_token_ids) // 4) for request in started)
            assert blocks < free_before, "handed over more than there is room for, and one block stays free"
        self._check_order([self.samples[request.id].message for request in started])
        assert taken_before or started or not len(core.intake.waiting), "they wait for nobody"
        stats = core.stats()
        assert stats.num_running <= core.config.max_num_seqs
        assert stats.admitted == sum(stats.finished.values()) + len(core.intake.requests)
        assert stats.generation_tokens == sum(len(sample.got) for sample in self.samples.values())

    def _check_order(self, started: list[AddRequest]) -> None:
        """No request that waits was ahead of one that was handed over; `fair` has an order among tenants besides."""
        for message in started:
            waiting: list[Request] = list(self.rig.core.intake.waiting)
            if self.rig.core.config.policy is Policy.FAIR:
                waiting = [request for request in waiting if request.tenant == message.tenant]
            assert all((message.background, self._key(message)) <= request.key[:2] for request in waiting), "overtaken"

    def _key(self, message: AddRequest) -> float:
        config = self.rig.core.config
        priority = message.priority if config.policy is Policy.PRIORITY else 0
        return message.arrival_time + priority * config.ageing_seconds

    def _check_output(self, output: RequestOutput) -> None:
        expected = self.samples[output.id]
        expected.got += output.token_ids
        assert expected.got == expected.tokens[: len(expected.got)], "other tokens than alone"
        if output.finish_reason is FinishReason.ABORT:
            assert expected.aborted, "aborted, and nobody asked for it"
        elif output.finish_reason is FinishReason.ERROR:
            self._check_error(output, expected.message)
        elif output.finish_reason is not None:
            assert (expected.got, output.finish_reason) == (expected.tokens, expected.reason)

    def _check_error(self, output: RequestOutput, message: AddRequest) -> None:
        assert output.error is not None
        code, config = output.error.code, self.rig.core.config
        if code == "deadline_exceeded":
            assert message.deadline is not None
            assert message.deadline <= self.rig.clock.now
        elif code == "context_length_exceeded":
            total = len(message.prompt_token_ids) + message.params.max_tokens
            assert total > 4 * self.rig.batcher.info.num_blocks
        elif code == "queue_full":
            assert config.max_queued_requests < 100 or config.max_queued_tokens < 1000
        elif code == "numerical_error":
            assert NAN in message.prompt_token_ids
        else:
            assert code == "step_failed"
            assert self.rig.core.broken

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        core = self.rig.core
        for _ in range(5000):
            if core.broken or not (self.inbox or core.has_work):
                break
            self._step()
        if core.broken:
            assert any(RAISE in request.prompt_token_ids for request in self.rig.batcher.started)
            assert not core.has_work
            return
        assert not core.has_work, "it does not come to an end"
        assert self.rig.ended.keys() == self.samples.keys()
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert not core.seats.num_promised_blocks
        assert core.next_look is None


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = machine_settings(60, 40)
