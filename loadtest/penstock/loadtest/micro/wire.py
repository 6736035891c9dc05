"""What one step's message costs at the process border."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engines.messages import EngineStats, RequestOutput, StepOutputs
from penstock.engines.process.wire import decode_up, encode
from penstock.loadtest.micro.timing import Measurement, measure

_ROUNDS = 200


def measurements() -> Iterator[Measurement]:
    message = StepOutputs([RequestOutput(1_000_000 + i, [i * 97]) for i in range(256)], EngineStats())
    data = encode(message)

    def encoding() -> None:
        for _ in range(_ROUNDS):
            encode(message)

    def decoding() -> None:
        for _ in range(_ROUNDS):
            decode_up(data)

    yield measure(f"encode a step of 256 deltas ({len(data)} bytes)", _ROUNDS, encoding)
    yield measure("decode a step of 256 deltas", _ROUNDS, decoding)
