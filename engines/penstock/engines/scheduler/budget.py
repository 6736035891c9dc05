"""Contents of a step: how many tokens prompts get, and which; when requests in the background compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.queues import RequestQueue
from penstock.engines.scheduler.request import Request, Run
from penstock.engines.scheduler.running import RunningRequests

_PROMPT_FLOOR = 32
"""Tokens that prompts get of every step, even if those that generate take longer than the target by themselves."""
_QUIET_FACTOR = 4.0
"""While no request generates, a step may take this many times the target: only new requests wait for its end. For
a step in the background that is too long: those that wait for it come before it."""
_MEMORY = 0.99
"""Weight of a step against the one after it: some hundred steps count."""
_SWEEPS = 3
_TOKENS_SCALE, _ATTENDED_SCALE = 1e-2, 1e-5
"""Bring tokens and attended tokens of a step to like sizes."""


class Pace:
    """seconds = a + b * tokens + c * (sum over tokens of the context that each attends to), a, b, c >= 0.

    Least squares with exponential forgetting; the coefficients are improved by a few sweeps of coordinate descent at
    each step, so that a coefficient that a stretch of equal steps does not determine keeps its value.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._base = self._per_token = self._per_attended = 0.0
        # weighted sums over the steps: 1, t, a, t*t, t*a, a*a, and the seconds times 1, t and a
        self._sums = (0.0,) * 9

    def observe(self, num_tokens: int, attended: float, seconds: float) -> None:
        """A step was measured. `attended`: see the class."""
        t, a = num_tokens * _TOKENS_SCALE, attended * _ATTENDED_SCALE
        n, st, sa, stt, sta, saa, ss, sts, sas = self._sums
        m = _MEMORY
        n, st, sa, stt, sta, saa = m * n + 1, m * st + t, m * sa + a, m * stt + t * t, m * sta + t * a, m * saa + a * a
        ss, sts, sas = m * ss + seconds, m * sts + t * seconds, m * sas + a * seconds
        self._sums = (n, st, sa, stt, sta, saa, ss, sts, sas)
        base, per_token, per_attended = self._base, self._per_token, self._per_attended
        for _ in range(_SWEEPS):
            if stt:
                best = (sts - st * base - sta * per_attended) / stt
                per_token = best if best > 0 else 0.0
            if saa:
                best = (sas - sa * base - sta * per_token) / saa
                per_attended = best if best > 0 else 0.0
            best = (ss - st * per_token - sa * per_attended) / n
            base = best if best > 0 else 0.0
        self._base, self._per_token, self._per_attended = base, per_token, per_attended
        self.num_observed += 1

    def seconds(self, num_tokens: int, attended: float) -> float:
        """What a step is expected to take; 0 while nothing is known."""
        tokens, attended = num_tokens * _TOKENS_SCALE, attended * _ATTENDED_SCALE
        return self._base + self._per_token * tokens + self._per_attended * attended

    def seconds_per_token(self, context: float) -> float:
        """What one more token of a step is expected to take, if it attends to `context` tokens."""
        return self._per_token * _TOKENS_SCALE + self._per_attended * context * _ATTENDED_SCALE

    def tokens_within(self, seconds: float, context: float) -> float:
        """How many tokens that each attend to `context` take so long."""
        token_seconds = self.seconds_per_token(context)
        return seconds / token_seconds if token_seconds > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step gives to prompts and to recomputation."""

    prompt_tokens: int
    shares: Mapping[int, int]
    """Tokens of running requests that have more than one to compute, by id; 0 for those that wait for a later step."""


_NO_SHARES: Mapping[int, int] = MappingProxyType({})
ONLY_DECODES = StepPlan(0, _NO_SHARES)


class StepBudget:
    """Divides steps between prompts and others. Knows how long steps take, once some were measured."""

    def __init__(self, config: SchedulerConfig, chunk: int) -> None:
        """`chunk`: most tokens of one request in a step (`largest_chunk`)."""
        self.pace = Pace()
        self.chunk = chunk
        self._config = config
        self._target = config.itl_target_ms / 1e3

    def plan(
        self,
        ready: Sequence[Run],
        prompts: Sequence[tuple[Run, int]],
        running: Sequence[Run],
        head: Request | None,
        *,
        short: bool = False,
    ) -> StepPlan:
        """`ready`, `prompts`: see `RunningRequests.ready`; `head`: the next request that waits, if a seat is free;
        `short`: so are steps in the background."""
        if not prompts and head is None:
            return ONLY_DECODES
        num_singles, num_generating, base_seconds = len(ready) - len(prompts), 0, 0.0
        if self._target:
            attended = sum([run.num_computed_tokens for run in ready]) - sum(r.num_computed_tokens for r, _ in prompts)
            base_seconds = self.pace.seconds(num_singles, attended)
            num_generating = sum([r.request.num_tokens > r.request.num_prompt_tokens for r in running])
        limit = self._config.max_num_batched_tokens - num_singles
        if self._target and self.pace.num_observed:
            first = ready[0].request if ready else head
            in_background = first is not None and first.background
            patience = self._target if num_generating or in_background else self._target * _QUIET_FACTOR
            if short and in_background:
                patience = min(patience, self._short_seconds)
            context = prompts[0][0].num_computed_tokens if prompts else 0
            within = self.pace.tokens_within(patience - base_seconds, context)
            limit = max(min(limit, _PROMPT_FLOOR), int(min(limit, within)))
        return StepPlan(limit, _shares(prompts, limit, self.chunk, head))

    def short_step(self, context: float) -> int:
        """How many requests a short step may have, which compute one token each and attend to `context`. At least 1."""
        within = self.pace.tokens_within(self._short_seconds - self.pace.seconds(0, 0.0), context)
        return max(1, int(min(within, self._config.max_num_seqs)))

    @property
    def _short_seconds(self) -> float:
        """Twice what the shortest step takes. Longer ones save little time for those that are in them."""
        return 2 * self.pace.seconds(0, 0.0)


def _shares(prompts: Sequence[tuple[Run, int]], limit: int, chunk: int, head: Request | None) -> dict[int, int]:
    """Divides `limit` tokens among prompts that are computed in parts, at most `chunk` for each.

    Half goes by the policy's order, so that the first always advances. The other half goes to those that are nearest
    to their end, so that short prompts do not wait behind a long one. Some of it is kept for the prompt at the head of
    the queue: once it has a seat, shorter ones behind it can follow. A prompt with more left to compute than the head
    gets none of the other half. Where a step may not end inside of an image, the first may exceed the limit by one.
    """
    shares: dict[int, int] = {}
    alone = len(prompts) == 1 and head is None
    in_order, left = limit if alone else (limit + 1) // 2, limit
    for run, count in prompts:
        share = shares[run.id] = min(count, in_order, chunk)
        in_order -= share
        left -= share
    if head is not None:
        left -= min(left, head.num_tokens, _PROMPT_FLOOR)
    for run, count in sorted(prompts, key=lambda entry: entry[1] - shares[entry[0].id]):
        share = shares[run.id]
        rest = count - share
        if head is None or rest <= head.num_tokens:
            more = min(rest, left, chunk - share)
            shares[run.id] += more
            left -= more
    for number, (run, _) in enumerate(prompts):
        shares[run.id] = run.cut(run.num_computed_tokens, shares[run.id], advances=number == 0)
    return shares


_LATELY = 2.0
"""Seconds after a request in which the next one is likely to come."""


class Background:
    """Its requests compute in steps in which no other request runs, or could. A request that comes during such a step
    waits for its end. So while others have been there lately, these steps are short."""

    def __init__(self, running: RunningRequests, waiting: RequestQueue, budget: StepBudget) -> None:
        self._running = running
        self._waiting = waiting
        self._budget = budget
        self._others_seen = -math.inf
        """When another request was there last."""

    def may_compute(self, now: float) -> bool:
        """No other request runs, or could."""
        if self._running.has_others:
            self._others_seen = now
            return False
        head = self._waiting.peek()
        return head is None or head.background

    def has_short_steps(self, now: float) -> bool:
        return now - self._others_seen <= _LATELY

    def first(self, ready: list[Run]) -> list[Run]:
        """Those of `ready` that are part of a short step. They stay the first until they end, so each has its turn."""
        return ready[: self._budget.short_step(ready[0].num_computed_tokens)]
