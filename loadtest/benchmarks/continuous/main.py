"""A benchmark of continuous batching: the same runner and requests, once with it and once in static batches.

`python loadtest/benchmarks continuous [MODEL] --lengths log`

64 requests want between 8 and 256 tokens, spread evenly or, as answers in the field are, by their logarithm: many short
ones, few long ones. A static batch of 16 is computed until its longest member is complete, rows
that are complete already included, and answers together, as a padded `generate()` does; the next batch waits for it.
The scheduler drops rows that are complete and fills every seat that becomes free, up to its own limit.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.core import EngineCore
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.models import find_model

_REQUESTS, _SHORTEST, _LONGEST, _STATIC_BATCH, _PROMPT = 64, 8, 256, 16, 32


def spread(lengths: str) -> list[int]:
    """How many tokens each request wants, ascending."""
    shares = [n / (_REQUESTS - 1) for n in range(_REQUESTS)]
    if lengths == "log":
        return [round(_SHORTEST * (_LONGEST / _SHORTEST) ** share) for share in shares]
    return [round(_SHORTEST + (_LONGEST - _SHORTEST) * share) for share in shares]


def requests(seed: int, spread_lengths: Sequence[int]) -> list[AddRequest]:
    rng = random.Random(seed)
    lengths = rng.sample(spread_lengths, len(spread_lengths))
    return [
        AddRequest(
            (n,),
            [rng.randrange(300, 3000) for _ in range(_PROMPT)],
            SamplingParams(max_tokens=length, temperature=0, ignore_eos=True),
            arrival_time=time.monotonic(),
        )
        for n, length in enumerate(lengths, 1)
    ]


def continuous(core: EngineCore, work: Sequence[AddRequest]) -> list[float]:
    """Seconds from the start to the end of each request."""
    started = time.perf_counter()
    ended: list[float] = []
    messages = work
    while len(ended) < len(work):
        result = core.step(messages)
        messages = ()
        now = time.perf_counter() - started
        ended += [now for output in result.outputs if output.finish_reason is not None]
    return ended


def static(core: EngineCore, work: Sequence[AddRequest]) -> list[float]:
    """The same for batches whose members all take as long as the longest."""
    started, ended = time.perf_counter(), []
    for first in range(0, len(work), _STATIC_BATCH):
        batch = work[first : first + _STATIC_BATCH]
        longest = max(request.params.max_tokens for request in batch if isinstance(request.params, SamplingParams))
        params = SamplingParams(max_tokens=longest, temperature=0, ignore_eos=True)
        continuous(core, [msgspec.structs.replace(request, params=params) for request in batch])
        ended += [time.perf_counter() - started] * len(batch)
    return ended


def main(settings: Mapping[str, Any]) -> int:
    """Prints medians as JSON. Returns the exit status."""
    runner = OpenVINORunner(OpenVINOConfig(model_dir=Path(find_model(settings["model"]).folder), num_blocks=2048))
    core = EngineCore(runner, SchedulerConfig(enable_prefix_caching=False, max_num_batched_tokens=512), time.monotonic)
    lengths = spread(settings["lengths"])
    continuous(core, requests(0, lengths)[:8])
    figures: dict[str, list[float]] = {}
    for repeat in range(settings["repeat"]):
        for name, way in (("continuous", continuous), ("static", static)):
            ended = way(core, requests(repeat, lengths))
            figures.setdefault(f"{name}_all_s", []).append(max(ended))
            figures.setdefault(f"{name}_mean_s", []).append(statistics.mean(ended))
    medians = {name: round(statistics.median(values), 3) for name, values in figures.items()}
    ratios = {
        f"ratio_{what}": round(medians[f"static_{what}_s"] / medians[f"continuous_{what}_s"], 2)
        for what in ("all", "mean")
    }
    print(json.dumps({**medians, **ratios, "runs": settings["repeat"]}))
    return 0
