"""Micro benchmarks of the messages between gateway and engine process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.micro.benchmark import Benchmark, Work

if TYPE_CHECKING:
    from penstock.engines.contract.messages import StepOutputs


def _step(number: int) -> StepOutputs:
    from penstock.engines.contract.engine_stats import EngineStats
    from penstock.engines.contract.messages import RequestOutput, StepOutputs, StepRecord

    outputs = [RequestOutput(1_000_000 + index, [index * 97]) for index in range(number)]
    return StepOutputs(outputs, EngineStats(num_running=number), [StepRecord(0.01, number, number)])


def _encode(number: int) -> Work:
    from penstock.engines.process.wire import encode

    message = _step(number)
    return Work(lambda: encode(message))


def _decode(number: int) -> Work:
    from penstock.engines.process.wire import decode_up, encode

    data = encode(_step(number))
    return Work(lambda: decode_up(data))


def _request() -> Work:
    """A request with a prompt of 1000 tokens, on its way down: encoded and decoded."""
    from penstock.engines.contract.messages import AddRequest, SamplingParams
    from penstock.engines.process.wire import decode_down, encode

    prompt = [number * 31 % 32_000 for number in range(1000)]
    message = AddRequest((1,), prompt, SamplingParams(max_tokens=256, temperature=0.7, seed=7), 12345.6)
    return Work(lambda: decode_down(encode(message)))


def _round_trip() -> Work:
    """A message of 64 deltas there, and one of a few bytes back, over a pair of sockets within this thread: what ZeroMQ
    and its Python side cost, without the kernel and without waking anybody."""
    from penstock.engines.process.wire import encode, pair_socket

    left, right = pair_socket(), pair_socket()
    left.bind("inproc://round-trip")
    right.connect("inproc://round-trip")
    there, back = encode(_step(64)), encode(_step(0))

    def run() -> None:
        left.send(there)
        right.recv()
        right.send(back)
        left.recv()

    return Work(run)


BENCHMARKS = (
    Benchmark("ipc/encode-step-64", "message of 64 deltas", partial(_encode, 64)),
    Benchmark("ipc/encode-step-256", "message of 256 deltas", partial(_encode, 256)),
    Benchmark("ipc/decode-step-64", "message of 64 deltas", partial(_decode, 64)),
    Benchmark("ipc/decode-step-256", "message of 256 deltas", partial(_decode, 256)),
    Benchmark("ipc/add-request-1000", "request of 1000 tokens", _request),
    Benchmark("ipc/zmq-round-trip", "round trip", _round_trip),
)
