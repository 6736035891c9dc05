"""The requests of a run."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.peers.launch import Launch
from benchmarks.peers.plan import HISTORY, PICTURE, TURNS, Case
from benchmarks.peers.process import Ports
from benchmarks.peers.served import Served, messages, options_of
from benchmarks.peers.settings import settings
from penstock.loadtest import workload

SERVED = Served(None, Launch(argv=[]), Ports(1, 2, 3), "", {})  # type: ignore[arg-type]
CHOSEN = settings({"dir": "d", "output_tokens": 16})


def chat(table: str) -> Case:
    return Case(table=table, model="tiny", protocol="openai-chat", concurrency=1)


def test_an_agent_has_one_session_that_grows() -> None:
    [session] = workload.build(options_of(SERVED, chat("turns"), CHOSEN, seed=1))
    assert len(session.calls) == TURNS
    assert [call.asked_prompt_tokens for call in session.calls[:2]] == [HISTORY + 184, 184]
    assert all(call.output_tokens == 16 for call in session.calls), "which are the rest of 200"
    assert len(list(workload.build(options_of(SERVED, chat("turns"), CHOSEN, seed=1, requests=4)))) == 4


def test_a_picture_is_sent_twice_and_differs_by_seed() -> None:
    pictures = []
    for seed in (1, 2):
        with messages(chat("images"), seed) as path:
            assert path is not None
            first, second = Path(path).read_text().splitlines()
            sessions = list(workload.build(options_of(SERVED, chat("images"), CHOSEN, seed=seed, dataset=path)))
        assert first == second
        assert [call.output_tokens for session in sessions for call in session.calls] == [16, 16]
        url = json.loads(first)["messages"][0]["content"][0]["image_url"]["url"]
        pictures.append(base64.b64decode(url.removeprefix("data:image/jpeg;base64,")))
    assert pictures[0] != pictures[1]
    assert Image.open(BytesIO(pictures[0])).size == PICTURE


@pytest.mark.parametrize("table", ["turns", "generation"])
def test_other_runs_need_no_file(table: str) -> None:
    with messages(chat(table), 0) as path:
        assert path is None
