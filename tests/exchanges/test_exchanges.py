"""Recorded exchanges: what clients see stays as it is while the inside changes.

The files in `recorded/` hold the answers of an earlier server. A change of an answer that is meant is recorded with
`RECORD_EXCHANGES=1 pytest tests/exchanges`, and its difference is read before it is committed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock.gateway
from exchanges import generating, tensors
from exchanges.exchange import Exchange, merged, over_http2, without_framing
from support.server import Server, serving

HERE = Path(__file__).parent
MODELS = HERE.parent / "differential/models"
REPOSITORY = ("add_sub", "strings", "classes", "errors", "repeat", "increment", "ensemble", "ensemble_stream")
GROUPS = {"generating": generating.EXCHANGES, "tensors": tensors.EXCHANGES}
DEMO = Path(next(iter(penstock.gateway.__path__))) / "demo_model"
RECORDING = "RECORD_EXCHANGES" in os.environ


def flags(folder: Path) -> tuple[str, ...]:
    """The demo model in float32, so that its text is the same on every processor, beside models of tensors."""
    for model in REPOSITORY:
        shutil.copytree(MODELS / model, folder / model)
    return (str(DEMO), "--dtype=f32", "--model-control-mode=explicit", "--load-model=*", f"--model-repository={folder}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(*flags(tmp_path_factory.mktemp("exchanges"))) as server:
        yield server


def recorded(group: str) -> dict[str, Any]:
    path = HERE / f"recorded/{group}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def cases() -> list[Any]:
    return [
        pytest.param(group, exchange, id=f"{group}-{exchange.name}")
        for group, exchanges in GROUPS.items()
        for exchange in exchanges
    ]


@pytest.mark.parametrize(("group", "exchange"), cases())
def test_the_answer_is_as_recorded(group: str, exchange: Exchange, server: Server) -> None:
    answer = json.loads(json.dumps(exchange.run(server)))
    if RECORDING:
        record(group, exchange.name, answer)
    assert answer == recorded(group)[exchange.name]
    assert json.dumps(answer) == json.dumps(recorded(group)[exchange.name]), "its members have another order"
    if exchange.request is not None:
        assert without_framing(over_http2(server, exchange.request)) == without_framing(answer)


def record(group: str, name: str, answer: Any) -> None:
    answers = {**recorded(group), name: answer}
    names = [exchange.name for exchange in GROUPS[group]]
    kept = {name: answers[name] for name in names if name in answers}
    (HERE / f"recorded/{group}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("group", GROUPS)
def test_each_recording_belongs_to_an_exchange(group: str) -> None:
    assert list(recorded(group)) == [exchange.name for exchange in GROUPS[group]]


def test_events_that_continue_a_text_are_one() -> None:
    pieces = [{"data": {"text": "a", "n": 1}}, {"data": {"text": "b", "n": 1}}, {"data": {"text": "c", "n": 2}}]
    assert merged(pieces) == [{"data": {"text": "ab", "n": 1}}, {"data": {"text": "c", "n": 2}}]
    assert merged([{"data": 1}, {"data": 2}, {"data": 2}]) == [{"data": 1}, {"data": 2}]
