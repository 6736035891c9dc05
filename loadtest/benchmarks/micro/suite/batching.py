"""The dynamic batcher: who goes together, and the tensors of those that do."""

from __future__ import annotations

from functools import partial

from benchmarks.micro.benchmark import Benchmark, Work

_CONFIG = """
    name: "add_sub" max_batch_size: 64 dynamic_batching { preferred_batch_size: [ %d ] }
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
    input { name: "INPUT1" data_type: TYPE_FP32 dims: [ 16 ] }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
    output { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 16 ] }
"""


def _queue(number: int) -> Work:
    """Requests arrive and are taken as one batch."""
    from google.protobuf import text_format

    from penstock.classic.batching.queue import DynamicBatcher, QueueEntry
    from penstock.classic.model_config import ModelConfig

    batcher: DynamicBatcher[QueueEntry] = DynamicBatcher(text_format.Parse(_CONFIG % number, ModelConfig()))
    items = [QueueEntry() for _ in range(number)]

    def run() -> None:
        for item in items:
            batcher.add(item, 1)
        batcher.expire(2)
        if len(batcher.take(2)) != number:
            raise RuntimeError("this is not the whole batch")

    return Work(run, number)


def _tensors(number: int) -> Work:
    """From the calls to the model's inputs and from its outputs to answers, with nothing computed in between."""
    import asyncio

    from google.protobuf import text_format

    from benchmarks.micro.suite.tensors import tensors
    from penstock.classic.batching.batch import ExecBatch, QueuedCall, UnaryCall
    from penstock.classic.messages import InferRequest
    from penstock.classic.model_config import ModelConfig
    from penstock.classic.signature import ModelSignature

    signature = ModelSignature(text_format.Parse(_CONFIG % number, ModelConfig()))
    loop = asyncio.new_event_loop()
    request = InferRequest(inputs={tensor.name: tensor for tensor in tensors("add_sub", "INPUT")})

    def run() -> None:
        calls: list[QueuedCall] = [UnaryCall(request, 1, loop.create_future()) for _ in range(number)]
        batch = ExecBatch(calls, signature, None)
        inputs = batch.gather()
        batch.scatter({"OUTPUT0": inputs["INPUT0"], "OUTPUT1": inputs["INPUT1"]})
        batch.close(None)
        batch.release()

    return Work(run, number)


BENCHMARKS = (
    *(Benchmark(f"batcher/queue-{number}", "request", partial(_queue, number)) for number in (8, 32)),
    *(Benchmark(f"batcher/gather-scatter-{number}", "request", partial(_tensors, number)) for number in (1, 8, 32)),
)
