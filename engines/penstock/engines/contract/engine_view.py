"""The view of an engine for operators: what its requests wait for, its blocks, its newest steps. Made only when it is
called for, and bounded."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from penstock.engines.contract.step_ring import StepRow

MOST_REQUESTS = 100
"""Of one view."""
MOST_CELLS = 1024
"""Of one map of blocks."""


class WaitsFor(StrEnum):
    """Why a request does not run."""

    NOTHING = ""
    """It runs, or it is the next one."""
    ADAPTER = "adapter"
    """Its adapter is being loaded."""
    GRAMMAR = "grammar"
    """Its grammar is being compiled."""
    IMAGE = "image"
    """One of its images is being encoded."""
    BLOCKS_OUTSIDE = "blocks_outside"
    """Blocks of its prompt are being read from files or from another engine's memory."""
    SAME_PROMPT = "same_prompt"
    """Another request computes the beginning of its prompt."""
    FIRST_SAMPLE = "first_sample"
    """The first sample of the same call computes the prompt."""
    FOREGROUND = "foreground"
    """It is in the background, and other requests run."""
    SEAT = "seat"
    """As many requests run as may run together."""
    BLOCKS = "blocks"
    """The KV cache has too few free blocks for it."""
    TURN = "turn"
    """Others are before it."""


class RequestView(msgspec.Struct, array_like=True, frozen=True):
    """One sample."""

    label: str
    """The id of its call, as the gateway knows it (`AddRequest.label`)."""
    status: str
    """waiting, running or preempted."""
    waits_for: WaitsFor
    tenant: str
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    """Of both together; steps under way included."""
    cached_tokens: int
    blocks: int
    """That it holds."""
    preemptions: int
    seconds: float
    """Since its arrival."""
    queued_seconds: float
    """Until it was scheduled first, or until now."""


class BlockMap(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of the KV cache. Each of them counts once."""

    blank: int
    """Free, with nothing in them."""
    cached: int
    """Free, with contents that the prefix cache knows."""
    used: int
    """Held by one request."""
    shared: int
    """Held by several."""
    stride: int
    """A cell stands for so many blocks, and shows the first of them."""
    cells: str
    """`.` blank, `c` cached, `u` used, `s` shared, each behind how many of it follow; at most MOST_CELLS of them."""


class EngineView(msgspec.Struct, array_like=True, frozen=True):
    now: float
    """Of the engine's clock, as are the times of steps."""
    requests: list[RequestView]
    """Those that run first, then those that wait in their order, at most MOST_REQUESTS."""
    more_requests: int
    """That are not in the list."""
    steps: list[StepRow]
    """The newest, in order."""
    target_seconds: float
    """That steps should take; 0: there is no target."""
    seats: int
    """Requests that may run together."""
    step_tokens: int
    """Most tokens of a step."""
    blocks: BlockMap | None = None
    """None: the engine does not say."""
