"""The mailbox between an engine and a client's call."""

from __future__ import annotations

from benchmarks.micro.benchmark import Benchmark, Work

_ROUNDS = 10


def _merging() -> Work:
    """A slow reader takes the 64 tokens of its stream at once."""
    from penstock.engines.client.stream import RequestStream
    from penstock.engines.contract.messages import RequestOutput

    stream = RequestStream((1,), lambda ids: None)

    def run() -> None:
        for _ in range(_ROUNDS):
            for token_id in range(64):
                stream.put(RequestOutput(1, [token_id]))
            stream.take()

    return Work(run, _ROUNDS * 64)


def _keeping_up() -> Work:
    """64 readers each take every token by itself."""
    from penstock.engines.client.stream import RequestStream
    from penstock.engines.contract.messages import RequestOutput

    streams = [(number, RequestStream((number,), lambda ids: None)) for number in range(64)]

    def run() -> None:
        for token_id in range(_ROUNDS):
            for number, stream in streams:
                stream.put(RequestOutput(number, [token_id]))
                stream.take()

    return Work(run, _ROUNDS * 64)


BENCHMARKS = (
    Benchmark("stream/merge-64", "token", _merging),
    Benchmark("stream/take-each", "token", _keeping_up),
)
