"""A step from its planning to its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engines.contract.step import SchedulerOutput
from penstock.engines.scheduler.request import Run


@dataclass(slots=True)
class StepUnderWay:
    """A step that is being planned or computed, and has no result yet."""

    number: int
    """Steps count from 1, in the order in which they are computed."""
    step: SchedulerOutput = field(default_factory=SchedulerOutput)
    runs: list[Run] = field(default_factory=list)
    """In the order of `step.request_ids`."""
    cut: list[int] = field(default_factory=list)
    """Which of them have known tokens that this step does not compute."""
    attended: float = 0.0
    """Sum over its tokens of the contexts that they attend to."""
    expected_seconds: float = 0.0
    """0: not known yet."""
    scheduled_at: float = 0.0

    def include_decodes(self, runs: Sequence[Run]) -> None:
        """Adds one token of each: what `include` does, but faster, since most steps are mostly this."""
        step, number = self.step, self.number
        step.request_ids += [run.id for run in runs]
        step.num_computed_tokens += [run.num_computed_tokens for run in runs]
        step.num_scheduled_tokens += [1] * len(runs)
        self.runs += runs
        for run in runs:
            run.num_computed_tokens += 1
            run.last_step = number

    def include(self, run: Run, count: int, guesses: Sequence[int] = (), forced: Sequence[int] = ()) -> None:
        """Adds the request's next `count` tokens, and either guesses of those behind its last known one to verify, or
        forced ones behind its last one."""
        step, start = self.step, run.num_computed_tokens
        if forced:
            step.forced[run.id] = list(forced)
            count += len(forced)
        if guesses:
            step.drafts[run.id] = list(guesses)
            run.verifies = True
            count += len(guesses)
        step.request_ids.append(run.id)
        step.num_scheduled_tokens.append(count)
        step.num_computed_tokens.append(start)
        run.num_computed_tokens = start + count
        run.last_step = self.number
        if start + count < run.request.num_tokens:
            self.cut.append(len(self.runs))
        self.runs.append(run)

    def top_up(self, left: int, chunk: int) -> None:
        """Gives `left` tokens that no waiting request could use to the prompts of this step, in order, up to `chunk`
        tokens of each."""
        counts = self.step.num_scheduled_tokens
        for index in self.cut:
            run = self.runs[index]
            start = run.num_computed_tokens
            more = min(left, run.request.num_tokens - start, chunk - counts[index])
            if more > 0 and start + more <= run.tables.capacity:  # where a window would have to grow: next time
                counts[index] += more
                run.num_computed_tokens = start + more
                left -= more

    def complete(self) -> None:
        """Sums up, once nothing more is added."""
        counts, starts = self.step.num_scheduled_tokens, self.step.num_computed_tokens
        total = self.step.total_num_scheduled_tokens = sum(counts)
        if total == len(counts):
            self.attended = sum(starts) + 0.5 * total
        else:
            self.attended = sum(n * (start + 0.5 * n) for n, start in zip(counts, starts, strict=True))

    def rewind(self) -> None:
        """The step is lost: its requests are where they were before it, and before those that followed it."""
        for run, start in zip(self.runs, self.step.num_computed_tokens, strict=True):
            run.rewind(start)
