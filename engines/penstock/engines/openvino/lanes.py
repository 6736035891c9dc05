"""The model compiled for different numbers of threads, and which of these a step takes.

OpenVINO fixes the number when it compiles. A single token of a small model is no faster on two threads than on one, but
a prompt or a batch is: so a small model is compiled twice, and both work on the same KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.kit.request_table import RequestTable
from penstock.engines.openvino.device import all_threads, default_threads
from penstock.engines.openvino.inputs import StepInputs

_WORK_PER_THREAD = 12 << 20
"""Bytes of weights times tokens that make one more thread worth waking (7 M and 5 M parameter models, two cores)."""

_MAX_COPIED_BYTES = 256 << 20
"""Larger models are compiled once: each compilation holds its own packed weights."""


@dataclass(frozen=True, slots=True)
class LanePlan:
    threads: int
    min_tokens: int
    """Fewest tokens of an inference that goes here."""


def plan_lanes(weight_bytes: int, cores: int, threads: int | None, most_tokens: int) -> list[LanePlan]:
    """By `min_tokens`, ascending. One lane where the number of threads was asked for, or where no request could have
    enough of its `most_tokens` for a second one."""
    if threads is not None:
        return [LanePlan(threads, 0)]
    few, many = default_threads(weight_bytes, cores), all_threads(cores)
    lanes = [LanePlan(few, 0)]
    min_tokens = max(2, -(-many * _WORK_PER_THREAD // weight_bytes))
    if few < many and weight_bytes <= _MAX_COPIED_BYTES and min_tokens <= most_tokens:
        lanes.append(LanePlan(many, min_tokens))
    return lanes


class Lane:
    """One compiled model with its infer request. `prepare` comes before the first inference."""

    inputs: StepInputs

    def __init__(self, plan: LanePlan, compiled: Any) -> None:
        self.plan = plan
        self.compiled = compiled
        self.request = compiled.create_infer_request()

    def prepare(self, table: RequestTable, block_size: int, capacity: int) -> None:
        """Makes the step inputs (`StepInputs`), once the block size is known from the compiled model."""
        self.inputs = StepInputs(self.request, table, block_size, capacity)

    def infer(self) -> Any:
        """The logits [N, vocab], which are overwritten by the next inference."""
        self.request.infer(share_outputs=True)  # no copy of the logits
        return self.request.get_output_tensor(0).data


def choose_lane(lanes: Sequence[Lane], num_tokens: int) -> Lane:
    return next(lane for lane in reversed(lanes) if num_tokens >= lane.plan.min_tokens)


def compile_lanes(plans: Sequence[LanePlan], compile_for: Callable[[int], Any]) -> list[Lane]:
    """`compile_for(threads)` compiles the model."""
    return [Lane(plan, compile_for(plan.threads)) for plan in plans]
