"""Requests that run: their seats and blocks, the steps that compute them, and what the runner knows of them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import add

from penstock.engines.contract.step import BlockUpdate, NewRequest, SchedulerOutput
from penstock.engines.scheduler.request import OrderKey, Request, RequestStatus, Run
from penstock.kvcache import BlockTables, KVCacheManager


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

    def include(self, run: Run, count: int) -> None:
        """Adds the request's next `count` tokens."""
        step, start = self.step, run.num_computed_tokens
        step.request_ids.append(run.id)
        step.num_scheduled_tokens.append(count)
        step.num_computed_tokens.append(start)
        run.num_computed_tokens = start + count
        run.last_step = self.number
        if start + count < run.request.num_tokens:
            self.cut.append(len(self.runs))
        self.runs.append(run)

    def add(self, index: int, count: int) -> None:
        """Gives request `index` of this step so many tokens more."""
        self.step.num_scheduled_tokens[index] += count
        self.runs[index].num_computed_tokens += count

    def top_up(self, left: int, chunk: int) -> None:
        """Gives `left` tokens that no waiting request could use to the prompts of this step, in order, up to `chunk`
        tokens of each."""
        counts = self.step.num_scheduled_tokens
        for index in self.cut:
            run = self.runs[index]
            start, before = run.num_computed_tokens, counts[index]
            more = min(left, run.request.num_tokens - start, chunk - before)
            more = run.cut(start - before, before + more, advances=False) - before
            if more > 0 and start + more <= run.tables.capacity:  # where a window would have to grow: next time
                self.add(index, more)
                left -= more

    def complete(self) -> None:
        """Sums up, once nothing more is added."""
        counts, starts = self.step.num_scheduled_tokens, self.step.num_computed_tokens
        total = self.step.total_num_scheduled_tokens = sum(counts)
        if total == len(counts):
            self.attended = sum(starts) + 0.5 * total
        else:
            self.attended = sum(n * (start + 0.5 * n) for n, start in zip(counts, starts, strict=True))

    @property
    def ends(self) -> list[int]:
        """Up to where each request's tokens are computed by it."""
        return list(map(add, self.step.num_computed_tokens, self.step.num_scheduled_tokens))

    def rewind(self) -> None:
        """The step is lost: its requests are where they were before it, and before those that followed it."""
        for run, start in zip(self.runs, self.step.num_computed_tokens, strict=True):
            run.rewind(start)


class RunningRequests:
    """Sorted by key: the last one is the one to preempt. Blocks of a request that lost its seat are given back when no
    step under way can write to them any more."""

    def __init__(self, kv: KVCacheManager, num_seats: int) -> None:
        self.runs: list[Run] = []
        self._num_seats = num_seats
        self._kv = kv
        self._known_to_runner: set[int] = set()
        """Ids that the runner knows."""
        self._dropped: list[int] = []
        """Ids that the runner may forget and has not been told of."""
        self.last_collected = 0
        """Number of the newest step that is not under way any more."""

    @property
    def num_free_seats(self) -> int:
        return self._num_seats - len(self.runs)

    @property
    def has_background(self) -> bool:
        """Some request in the background has a seat. They are behind the others."""
        return bool(self.runs) and self.runs[-1].request.background

    @property
    def has_others(self) -> bool:
        """Some request that is not in the background has a seat."""
        return bool(self.runs) and not self.runs[0].request.background

    def ready(self, *, background: bool = True) -> tuple[list[Run], list[tuple[Run, int]]]:
        """(those that can compute something next, in order; those of them that can compute more than one token, with
        how many). Those that must wait for a result are left out, and without `background` those in it."""
        ready, prompts = [], []
        for run in self.runs:
            request = run.request
            if request.background and not background:
                break
            count = request.num_tokens - run.num_computed_tokens
            if count < 1:  # steps under way compute all that is known of it, and sample its next token
                if run.num_computed_tokens + 1 >= request.max_num_tokens or run.verifies:
                    continue
                if request.followers:
                    continue  # they fork from it when its prompt's last step is collected
            elif count > 1:
                prompts.append((run, count))
            ready.append(run)
        return ready, prompts

    def start(self, request: Request, tables: BlockTables, num_computed_tokens: int) -> Run:
        """Gives the request a seat."""
        run = request.run = Run(request, tables, num_computed_tokens)
        request.status = RequestStatus.RUNNING
        insort(self.runs, run, key=_key)
        return run

    def stop(self, run: Run) -> None:
        """The request loses its seat; `sweep` takes it out of the list."""
        run.has_seat = False
        run.request.run = None
        self.vacate(run)

    def stop_last(self) -> Run:
        """Takes the seat of the one to preempt."""
        run = self.runs.pop()
        self.stop(run)
        return run

    def sweep(self) -> None:
        self.runs = [run for run in self.runs if run.has_seat]

    def vacate(self, run: Run) -> None:
        """Gives back the blocks of a request without a seat, and lets the runner forget it. Not while a step under way
        writes to them: this is called again when that step is collected."""
        if run.last_step > self.last_collected:
            return
        self._kv.free(run.tables)
        if run.id in self._known_to_runner:
            self._known_to_runner.discard(run.id)
            self._dropped.append(run.id)

    def grow(self, run: Run, count: int, step: SchedulerOutput) -> bool:
        """Makes the next `count` positions writable. False, and nothing changes, when blocks are short."""
        start = run.num_computed_tokens
        if start + count <= run.tables.capacity:
            return True
        growth = self._kv.grow(run.tables, start, start + count)
        if growth is None:
            return False
        if run.id in self._known_to_runner:
            step.block_updates += [BlockUpdate(run.id, *update) for update in growth.updates]
            step.block_copies += growth.copies
        return True

    def knows_any(self, ids: Iterable[int]) -> bool:
        """The runner knows one of these ids, if only until the steps under way are collected."""
        return not self._known_to_runner.isdisjoint(ids)

    def tell(self, step: SchedulerOutput, runs: Iterable[Run]) -> None:
        """Adds to the step what the runner must be told before it computes tokens of these requests."""
        step.dropped_ids, self._dropped = self._dropped, []
        if self._known_to_runner.issuperset(step.request_ids):
            return
        for run in runs:
            if run.id not in self._known_to_runner:
                self._known_to_runner.add(run.id)
                step.new_requests.append(_new_request(run))
                step.block_copies += run.tables.copies
                step.block_loads += run.tables.loads

    def copied(self, runs: Iterable[Run]) -> None:
        """A step with these has succeeded, and made their copies. None that has copies is in another step under way."""
        for run in runs:
            if run.tables.copies:
                self._kv.copied(run.tables)

    def loaded(self, runs: Iterable[Run]) -> None:
        """A step that loaded blocks for some of these has succeeded."""
        for run in runs:
            self._kv.loaded(run.tables)

    def lost(self, runs: Iterable[Run]) -> None:
        """The runner has lost steps of these, and forgotten all requests."""
        self._known_to_runner.clear()
        self._dropped.clear()
        for run in runs:
            if not run.has_seat:
                self.vacate(run)


def _key(run: Run) -> OrderKey:
    return run.request.key


def _new_request(run: Run) -> NewRequest:
    request = run.request
    return NewRequest(
        id=request.id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=run.tables.block_ids,
        params=request.pooling or request.params,
        seed=request.seed,
        adapter=request.adapter,
        grammar=None if request.grammar is None else request.grammar.compiled,
        embeddings=[] if request.images is None else request.images.embeddings,
        tiles=[] if request.images is None else request.images.tiles,
    )
