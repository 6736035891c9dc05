"""No exchange leaves a reference cycle: the garbage collector stops everything while it looks for them.

A cycle for each request was 10 ms in which nothing else ran, several times a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from exchanges.exchange import Exchange, over_http2
from exchanges.test_exchanges import GROUPS, flags
from support.inside import Inside
from support.server import Server, serving

TIMES = 25
ALLOWED = 0.4
"""Objects for each request, on average: timers and other clients' work go on meanwhile. The smallest cycle has two."""
EXCHANGES = [
    exchange
    for exchanges in GROUPS.values()
    for exchange in exchanges
    if exchange.name
    in {
        "chat: plain",
        "chat: streamed",
        "chat: a tool that must be called, streamed",
        "chat: a schema",
        "chat: no messages",
        "chat: an unknown model",
        "completions: streamed",
        "completions: a client that leaves",
        "responses: plain",
        "responses: streamed",
        "messages: streamed",
        "messages: an unknown model",
        "ollama: chat streamed",
        "tokenize",
        "an unknown path",
        "live",
        "infer: plain",
        "infer: binary inputs",
        "infer: an ensemble",
        "infer: a missing input",
        "infer: an error of the model: NOT_FOUND",
        "infer: an error of the model: raise",
        "infer: a language model",
        "generate: text",
        "generate_stream: three responses",
        "generate_stream: an error in the middle",
        "generate_stream: an ensemble",
        "gRPC ModelInfer: plain",
        "gRPC ModelInfer: an ensemble",
        "gRPC ModelInfer: a language model",
        "gRPC ModelInfer: an unknown model",
        "gRPC ModelInfer: an error of the model",
        "gRPC ModelStreamInfer: a language model",
        "gRPC ModelStreamInfer: three responses",
        "gRPC ModelStreamInfer: an error in the middle",
        "gRPC ModelStreamInfer: a client that leaves",
    }
]


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    module = Path(__file__).parents[1] / "support" / "garbage.py"
    with Inside(tmp_path_factory.mktemp("inside"), module) as inside:
        yield inside


@pytest.fixture(scope="module")
def server(inside: Inside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(*flags(tmp_path_factory.mktemp("models")), environ=inside.environ) as server:
        yield server


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
def test_nothing_is_left_to_the_collector(exchange: Exchange, server: Server, inside: Inside) -> None:
    exchange.run(server)  # what is made at the first request may stay
    inside.command(b"d")
    for _ in range(TIMES):
        exchange.run(server)
    if exchange.request is not None:
        for _ in range(TIMES):
            over_http2(server, exchange.request)
    left = [process for process in inside.command(b"c") if process["objects"] > TIMES * ALLOWED]
    assert left == []


def test_each_name_is_an_exchange() -> None:
    assert len(EXCHANGES) == 36
