"""What executions and responses add to a model's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

from penstock.classic.batch import ExecBatch
from penstock.classic.call import Call
from penstock.classic.messages import InferResponse
from penstock.classic.statistics import MAX_RESPONSE_STATISTICS, ModelStatistics
from penstock.engines.errors import CancelledError, PenstockError


def count_batch(statistics: ModelStatistics, batch: ExecBatch, answers: Sequence[tuple[Call, InferResponse]]) -> None:
    """An execution that has ended, and its answers: of a model that is not decoupled one, the last, for each call."""
    compute_input, compute_infer, compute_output = batch.durations()
    if not batch.failed:
        statistics.executed(batch.size, compute_input, compute_infer, compute_output)
    now, start = monotonic_ns(), batch.start_ns
    requests = inferences = total = queue = 0
    observer = statistics.observer
    for call, response in answers:
        if response.error is not None:
            statistics.failed(now - call.arrived_ns, _reason(response.error))
            continue
        requests += 1
        inferences += call.size
        total += now - call.arrived_ns
        queue += start - call.arrived_ns
        if call.request.timings is not None:
            call.request.timings.add(compute_input, compute_infer, compute_output)
        if observer is not None:
            observer.request(
                now - call.arrived_ns, start - call.arrived_ns, compute_input, compute_infer, compute_output
            )
    if requests:
        statistics.succeeded(
            requests=requests,
            inferences=inferences,
            total=total,
            queue=queue,
            compute_input=compute_input,
            compute_infer=compute_infer,
            compute_output=compute_output,
        )


def count_response(statistics: ModelStatistics, call: Call, batch: ExecBatch, response: InferResponse) -> None:
    """A response of a decoupled model; its time is that since the one before it."""
    now = monotonic_ns()
    one = statistics.responses[min(call.responses, MAX_RESPONSE_STATISTICS - 1)]
    spent = now - (call.last_ns or batch.input_end_ns or batch.start_ns)
    observer = statistics.observer
    if observer is not None and not call.responses:
        observer.first_response(now - call.arrived_ns)
    call.responses += 1
    call.last_ns = now
    if response.error is not None:
        one.fail.add(spent)
    elif response.outputs:
        one.compute_infer.add(spent)
        one.compute_output.add(0)
        one.success.add(spent)
    else:
        one.empty_response.add(spent)
    if not response.final:
        return
    if response.error is not None:
        statistics.failed(now - call.arrived_ns, _reason(response.error))
        return
    total, queue = now - call.arrived_ns, batch.start_ns - call.arrived_ns
    compute_input = max(0, batch.input_end_ns - batch.start_ns)
    compute_infer = now - batch.start_ns - compute_input
    if call.request.timings is not None:
        call.request.timings.add(compute_input, compute_infer, 0)
    if observer is not None:
        observer.request(total, queue, compute_input, compute_infer, 0)
    statistics.succeeded(
        requests=1,
        inferences=call.size,
        total=total,
        queue=queue,
        compute_input=compute_input,
        compute_infer=compute_infer,
        compute_output=0,
    )


def _reason(error: PenstockError) -> str:
    return "CANCELED" if isinstance(error, CancelledError) else "BACKEND"
