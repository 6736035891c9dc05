"""Scheduling policies: the order of requests, as a key that is fixed when a request arrives."""

from __future__ import annotations

from enum import StrEnum

from penstock.engines.scheduler.fair import FairQueue
from penstock.engines.scheduler.queue import KeyedQueue, RequestQueue
from penstock.engines.scheduler.request import Request


class Policy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


def make_queue(policy: Policy) -> RequestQueue:
    return FairQueue() if policy is Policy.FAIR else KeyedQueue()


def order_key(policy: Policy, request: Request, ageing_seconds: float) -> tuple[float, int]:
    """Lower is earlier. Ties go to the lower id.

    With linear ageing, "priority p, waiting since t" is at every moment as urgent as "priority 0, waiting since
    t + p * ageing_seconds". So priorities with ageing need no clock and no re-sorting.
    """
    if policy is Policy.PRIORITY:
        return (request.arrival_time + request.priority * ageing_seconds, request.id)
    return (request.arrival_time, request.id)
