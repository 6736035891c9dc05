"""From a message to the requests that it asks for."""

from __future__ import annotations

import random

from penstock.engines.contract.messages import AddRequest
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.policy import order_key
from penstock.engines.scheduler.request import Request


def samples_of(message: AddRequest, config: SchedulerConfig, eos: frozenset[int]) -> list[Request]:
    """One Request for each of the message's ids, in order; who leads is the scheduler's affair."""
    params = message.params
    stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    samples = []
    for index, request_id in enumerate(message.ids):
        seed = random.getrandbits(63) if params.seed is None else params.seed + index
        request = Request(request_id, message, list(message.prompt_token_ids), seed, stop)
        request.key = order_key(config.policy, request, config.ageing_seconds)
        samples.append(request)
    return samples
