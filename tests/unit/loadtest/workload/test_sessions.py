"""Determinism, parts, bounds, sessions of several turns."""

from __future__ import annotations

from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest import workload
from support.workload import DEMO, calls, sessions, settings, write

TRACE = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
TRACE += [f"{5 * row},ChatGPT,{10 + row},{row % 5},0,API log" for row in range(30)]
SAID = '{"from": "human", "value": "q%d"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "r"}'
SHAREGPT = f'{{"conversations": [{SAID}]}}'


@pytest.fixture(params=["closed", "poisson", "ids", "turns", "mix", "dataset", "trace"])
def values(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    chat = {"protocol": "openai-chat", "requests": 41}
    dataset = write(tmp_path, "sharegpt.jsonl", *(SHAREGPT % number for number in range(40)))
    return {
        "closed": {"requests": 41, "prompt_tokens_stddev": 30, "output_tokens_stddev": 30},
        "poisson": {"requests": 41, "rate": 3.0, "ramp": 2.0, "tokenizer": str(DEMO)},
        "ids": {"requests": 41, "tokenizer": str(DEMO), "token_ids": True, "shared_prefix_tokens": 9, "prefixes": 4},
        "turns": {**chat, "turns": 3, "turn_delay": 2.0},
        "mix": {**chat, "mix": ["3 a turns=2", f"2 b dataset={dataset} turns=2", "1 c prompt_tokens_stddev=30"]},
        "dataset": {**chat, "dataset": dataset, "turns": 2},
        "trace": {"trace": write(tmp_path, "burst.csv", *TRACE)},
    }[request.param]


def test_equal_seeds_give_equal_sessions_and_other_seeds_others(values: dict[str, Any]) -> None:
    assert sessions(**values) == sessions(**values)
    assert sessions(**values) != sessions(**values, seed=1)
    assert list(workload.build(settings(**values), seed=1)) == sessions(**values, seed=1)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_parts_are_every_so_manieth_session_of_the_whole(values: dict[str, Any], parts: int) -> None:
    shares = [list(workload.build(settings(**values), part=part, parts=parts)) for part in range(parts)]
    woven = [session for row in zip_longest(*shares) for session in row if session is not None]
    assert woven == sessions(**values)
    assert all(shares)


def test_calls_are_counted_from_0(values: dict[str, Any]) -> None:
    sent = calls(**values)
    assert [call.index for call in sent] == list(range(len(sent)))
    assert len(sent) == values.get("requests", 24), "the trace has 24 requests with an answer"


def test_how_many() -> None:
    assert len(sessions()) == 64
    assert len(sessions(requests=5, duration=1)) == 5
    endless = workload.build(settings(duration=1, prompt_tokens=1))
    assert sum(1 for _ in islice(endless, 1000)) == 1000


def test_later_turns_wait_and_have_no_shared_prefix() -> None:
    first, *_, last = sessions(
        "openai-chat", requests=7, turns=3, turn_delay=1.5, shared_prefix_tokens=4, prompt_tokens=6
    )
    assert [len(str(call.prompt).split()) for call in first.calls] == [10, 6, 6]
    assert [call.delay for call in first.calls] == [0.0, 1.5, 1.5]
    assert len(last.calls) == 1, "7 requests are two sessions and a beginning"
    assert len({call.prompt for call in first.calls}) == 3


def test_only_what_generates_has_output_tokens() -> None:
    assert [calls(protocol, requests=1)[0].output_tokens for protocol in ("openai-chat", "openai-embeddings")] == [
        128,
        0,
    ]
    tensors = calls("kserve-grpc", requests=2, rate=1.0)
    assert [(call.prompt, call.output_tokens, call.prompt_tokens) for call in tensors] == [("", 0, None)] * 2


def test_who_keeps_texts() -> None:
    for values, kept in (({}, False), ({"turns": 2}, True), ({"mix": ["1 a", "1 b turns=4"]}, True)):
        assert workload.keeps_text(settings("openai-chat", **values).workload) is kept
