"""Complete check of the scheduler, after every step of a test. At idle `Scheduler.check_idle` is enough."""

from __future__ import annotations

from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache.integrity import require


def check_integrity(scheduler: Scheduler) -> None:
    """Raises IntegrityError unless queues, seats, steps and blocks agree. At idle every block must be free."""
    scheduler.kv.check_integrity()
    intake, runs = scheduler.intake, scheduler.running.runs
    requests, waiting = intake.requests, list(intake)
    followers = [f for r in requests.values() for f in r.followers]
    require(len(runs) + len(waiting) + len(followers) == len(requests), "a request is lost")
    intake.check_integrity()
    require(scheduler.num_waiting == len(waiting) + len(followers), "waiting requests miscounted")
    keys = [run.request.key for run in runs]
    require(keys == sorted(keys), "running is out of order")
    require(len(runs) <= scheduler.config.max_num_seqs, "more requests than seats")
    require(all(run.has_seat and run.request.run is run for run in runs), "a seat without a request")
    require(all(r.run is None for r in (*waiting, *followers)), "a waiting request has a seat")
    collected = scheduler.running.last_collected
    under_way = [run for step in scheduler.under_way for run in step.runs]
    holders = {*runs, *under_way}
    for run in holders:
        newest = max((step.number for step in scheduler.under_way if run in step.runs), default=0)
        require(run.last_step == newest if newest else run.last_step <= collected, "last_step is wrong")
        unknown = run.verifies or not run.has_seat
        forced = sum(len(step.step.forced.get(run.id, ())) for step in scheduler.under_way if run in step.runs)
        require(unknown or run.num_pending_tokens <= under_way.count(run) + forced, "more computed than known")
    require({run.tables for run in holders} == scheduler.kv.holders, "block tables and running requests differ")
    if not requests and not under_way:
        scheduler.check_idle()
