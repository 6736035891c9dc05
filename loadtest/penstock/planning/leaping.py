"""The engine's own scheduler, which can also do many equal steps at once.

Most steps of a language model give each running request one token, and nothing else happens: nobody waits, nobody
ends, and blocks are plenty. What such steps leave behind is known without planning them one by one. Everything else,
admission, shares of prompts, preemption, the prefix cache, is the code that serves.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.scheduler.scheduler import Scheduler

TOKEN = 1
"""What every step samples: which token it is changes nothing here."""


class LeapingScheduler(Scheduler):
    def num_equal_steps(self, spare_blocks: int) -> int:
        """How many of the next results can be taken in by `leap`: those of steps under way, and of the steps that
        would be planned as they come in. 0 where the next one has to be looked at. `spare_blocks` stay free."""
        runs, depth = self.running.runs, self.config.steps_in_flight
        if not runs or len(self.under_way) < depth or self.num_waiting or self.trials or self._must_drain:
            return 0
        for step in self.under_way:
            planned = step.step
            if planned.total_num_scheduled_tokens != len(runs) or step.runs != runs or planned.block_copies:
                return 0
        left = min(run.request.max_num_tokens - run.request.num_tokens for run in runs) - depth
        if left < 1 or any(run.request.num_tokens == run.request.num_prompt_tokens for run in runs):
            return 0
        size = self.info.block_size
        rounds = (self.kv.pool.num_free - spare_blocks) // len(runs) - 1
        return max(0, min(left, rounds * size))

    def attended_next(self) -> float:
        """Of the oldest step under way; each later one of equal steps attends to one token more of each request."""
        return self.under_way[0].attended

    def leap(self, seconds: Sequence[float]) -> None:
        """Takes in the results of so many equal steps, which have taken these times, and plans as many new ones."""
        count, runs, depth = len(seconds), self.running.runs, self.config.steps_in_flight
        num_runs, attended = len(runs), self.attended_next()
        scratch = SchedulerOutput()
        outputs = []
        for run in runs:
            if not self.running.grow(run, count, scratch):
                raise RuntimeError("a leap has run out of blocks")
            outputs.append(run.request.append([TOKEN] * count, self.intake.eos))
            run.num_computed_tokens += count
            run.last_step += count
            computed = run.num_computed_tokens - depth
            if computed >= run.tables.next_publish:
                self.kv.publish(run.tables, run.request.token_ids, computed)
        for duration in seconds:
            self.budget.pace.observe(num_runs, attended, duration)
            attended += num_runs
        for step in self.under_way:
            step.number += count
            step.attended += count * num_runs
            step.step.num_computed_tokens = [start + count for start in step.step.num_computed_tokens]
        self._num_steps += count
        self.running.last_collected += count
        self.intake.stats.steps += count
        self.intake.stats.generation_tokens += count * num_runs
        self.intake.emit(outputs)
