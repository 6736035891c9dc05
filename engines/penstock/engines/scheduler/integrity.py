"""The scheduler checks itself: in tests after every step, elsewhere whenever somebody doubts."""

from __future__ import annotations

from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache.pool import require


def check_integrity(scheduler: Scheduler) -> None:
    """Raises IntegrityError unless queues, seats and blocks agree. At idle every block must be free."""
    scheduler.kv.check_integrity()
    requests, running, waiting = scheduler.requests, scheduler.running, list(scheduler.waiting)
    followers = [f for r in requests.values() for f in r.followers]
    require(len(running) + len(waiting) + len(followers) == len(requests), "a request is lost")
    require(len(waiting) == len(scheduler.waiting), "the queue's length is wrong")
    promised = sum(len(r.followers) for r in running)
    require(scheduler.num_waiting == len(waiting) + len(followers) - promised, "waiting requests miscounted")
    require(scheduler.num_waiting_tokens == sum(r.num_tokens for r in waiting), "waiting tokens miscounted")
    keys = [r.key for r in running]
    require(keys == sorted(keys), "running is out of order")
    require(all(r.table is not None for r in running), "a running request has no blocks")
    idle = [*waiting, *followers]
    require(
        all(r.table is None and not r.num_computed_tokens for r in idle), "a waiting request has blocks or progress"
    )
    if not requests:
        require(scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks, "blocks leaked")
