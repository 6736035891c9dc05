"""From samples to figures. docs/loadtest.md defines each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.latency import Objective, gaps, is_good, latencies
from penstock.loadtest.messages import Sample

PERCENTILES = (50, 90, 95, 99)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. Percentiles are interpolated linearly between the two nearest values."""

    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    min: float
    mean: float
    std: float
    count: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Distribution | None:
        """None for nothing."""
        if not seconds:
            return None
        values: npt.NDArray[np.float64] = np.asarray(seconds, np.float64) * 1e3
        p50, p90, p95, p99 = (round(float(p), 3) for p in np.percentile(values, PERCENTILES))
        return Distribution(
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            max=round(float(values.max()), 3),
            min=round(float(values.min()), 3),
            mean=round(float(values.mean()), 3),
            std=round(float(values.std()), 3),
            count=len(values),
        )


class FromSend(msgspec.Struct, frozen=True, kw_only=True):
    """The same latencies counted from the moment of sending, whatever was intended."""

    ttft_ms: Distribution | None
    e2e_ms: Distribution | None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    objectives: list[Objective]
    good: int
    share: float
    """Of all requests that were sent, failed ones included."""
    requests_per_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run has shown. Latencies are those of complete requests only."""

    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    latency_from: str
    """`intended` (open loop: no coordinated omission) or `sent`."""
    from_send: FromSend
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    completed: int
    errors: dict[str, int]
    """Failed requests by kind."""
    error_details: dict[str, str]
    """For each kind, what the first of its kind said."""
    interrupted: int
    """Cut off at the end of the run: in no other figure."""
    duration_s: float
    """From the start of the run to the last answer, or, where requests were cut off, to the end of its time."""
    output_tokens: int
    prompt_tokens: int
    goodput: Goodput | None = None

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    @property
    def ended(self) -> int:
        """Requests that were completed or failed."""
        return self.completed + self.failed


def summarize(
    samples: Sequence[Sample], *, open_loop: bool, objectives: Sequence[Objective] = (), lasts: float = 0.0
) -> Figures:
    """The figures of one run. `lasts`: seconds for which requests were to be begun. A run of which requests were cut
    off has taken at least so long, or until the cut: else a server that answers for a second, then never again, would
    have the throughput of that second."""
    counted = [sample for sample in samples if sample.error != INTERRUPTED]
    good = [sample for sample in counted if not sample.error]
    failed = [sample for sample in counted if sample.error]
    cut = max((sample.ended for sample in samples if sample.error == INTERRUPTED), default=0.0)
    seconds = max((*(sample.ended for sample in counted), min(cut, lasts)))
    measured = [latencies(sample, from_intended=open_loop) for sample in good]
    sent = [latencies(sample, from_intended=False) for sample in good]
    output = sum(sample.tokens for sample in good)
    prompt = sum(sample.prompt_tokens or sample.wanted_prompt_tokens or 0 for sample in good)

    def per_second(amount: float) -> float:
        return round(amount / seconds, 3) if seconds else 0.0

    return Figures(
        ttft_ms=Distribution.of([value.ttft for value in measured if value.ttft is not None]),
        itl_ms=Distribution.of([gap for sample in good for gap in gaps(sample)]),
        tpot_ms=Distribution.of([value.tpot for value in measured if value.tpot is not None]),
        e2e_ms=Distribution.of([value.e2e for value in measured]),
        latency_from="intended" if open_loop else "sent",
        from_send=FromSend(
            ttft_ms=Distribution.of([value.ttft for value in sent if value.ttft is not None]),
            e2e_ms=Distribution.of([value.e2e for value in sent]),
        ),
        output_tokens_per_s=per_second(output),
        total_tokens_per_s=per_second(output + prompt),
        requests_per_s=per_second(len(good)),
        completed=len(good),
        errors=dict(Counter(sample.error for sample in failed)),
        error_details={sample.error: sample.detail for sample in reversed(failed)},
        interrupted=len(samples) - len(counted),
        duration_s=round(seconds, 3),
        output_tokens=output,
        prompt_tokens=prompt,
        goodput=_goodput(counted, open_loop, objectives, seconds) if objectives else None,
    )


def _goodput(samples: Sequence[Sample], open_loop: bool, objectives: Sequence[Objective], seconds: float) -> Goodput:
    good = sum(
        not sample.error and is_good(latencies(sample, from_intended=open_loop), objectives) for sample in samples
    )
    return Goodput(
        objectives=list(objectives),
        good=good,
        share=round(good / len(samples), 4) if samples else 0.0,
        requests_per_s=round(good / seconds, 3) if seconds else 0.0,
    )
