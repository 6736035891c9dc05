"""Prompts from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest import workload
from penstock.loadtest.errors import LoadTestError
from support.workload import DEMO, calls, demo, sessions, settings, write

SHAREGPT = [
    {"id": "QWJhYvA_0", "conversations": [
        {"from": "human", "value": "Summarize the file"},
        {"from": "gpt", "value": "It opens the file and reads a line."},
        {"from": "human", "value": "And then?"},
        {"from": "gpt", "value": "It closes it."},
    ]},
    {"id": "i6IyJda_0", "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hello"},
    ]},
    {"id": "twice", "conversations": [{"from": "human", "value": "One"}, {"from": "human", "value": "Two"}]},
    {"id": "empty", "conversations": []},
    {"id": "silent", "conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "Yes?"}]},
    {"id": "bot", "conversations": [{"from": "gpt", "value": "I begin."}]},
]  # fmt: skip


@pytest.fixture
def sharegpt(tmp_path: Path) -> str:
    return write(tmp_path, "sharegpt.json", json.dumps(SHAREGPT, indent=1))


def by_prompt(protocol: str, **values: Any) -> dict[str, tuple[int, int | None]]:
    return {str(call.prompt): (call.output_tokens, call.prompt_tokens) for call in calls(protocol, **values)}


def test_sharegpt_first_turns(sharegpt: str) -> None:
    assert by_prompt("openai-chat", dataset=sharegpt, output_tokens=9) == {
        "Summarize the file": (9, None),
        "Hello": (9, None),
        "One": (9, None),
    }


def test_sharegpt_answers_are_as_long_as_recorded_where_they_can_be_counted(sharegpt: str) -> None:
    def count(text: str) -> int:
        return len(demo().encode(text).ids)

    assert by_prompt("openai-completions", dataset=sharegpt, output_tokens=9, tokenizer=str(DEMO)) == {
        "Summarize the file": (count("It opens the file and reads a line."), count("Summarize the file")),
        "Hello": (9, count("Hello")),
        "One": (9, count("One")),
    }


def test_sharegpt_conversations(sharegpt: str) -> None:
    found = sessions("openai-chat", dataset=sharegpt, turns=5, turn_delay=1)
    prompts = [[(call.prompt, call.delay) for call in session.calls] for session in found]
    assert sorted(prompts) == [
        [("Hello", 0.0)],
        [("One", 0.0), ("Two", 1.0)],
        [("Summarize the file", 0.0), ("And then?", 1.0)],
    ]


def test_what_has_no_prompt_is_counted(sharegpt: str) -> None:
    assert workload.build(settings("openai-chat", dataset=sharegpt)).skipped == 3


def test_json_lines(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = ['{"prompt": "a", "output_tokens": 3}', "", json.dumps({"messages": messages, "max_tokens": 4, "id": 7})]
    path = write(tmp_path, "prompts.jsonl", *lines, '{"prompt": "b"}', '{"prompt": ""}')
    sent = calls("openai-chat", dataset=path, output_tokens=5, duration=60)
    found = sorted(((call.prompt, call.output_tokens) for call in sent), key=lambda one: one[1])
    assert found == [("a", 3), (messages, 4), ("b", 5)]
    assert {call.prompt_tokens for call in sent} == {None}


def test_json_lines_with_ids(tmp_path: Path) -> None:
    path = write(tmp_path, "ids.jsonl", '{"prompt": [5, 6, 7]}')
    (call,) = calls(dataset=path)
    assert (call.prompt, call.prompt_tokens) == ([5, 6, 7], 3)
    with pytest.raises(LoadTestError, match=r"ids.jsonl, line 1: openai-chat takes no token ids"):
        calls("openai-chat", dataset=path)


def test_each_prompt_once_in_the_seed_s_order(tmp_path: Path) -> None:
    path = write(tmp_path, "many.jsonl", *(json.dumps({"prompt": str(number)}) for number in range(50)))
    order = [call.prompt for call in calls(dataset=path)]
    assert sorted(order, key=int) == [str(number) for number in range(50)] != order
    assert [call.prompt for call in calls(dataset=path, requests=20)] == order[:20]
    assert [call.prompt for call in calls(dataset=path, seed=1)] != order
    with pytest.raises(LoadTestError, match="requests: the dataset has 50"):
        calls(dataset=path, requests=51)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"prompt": "a"}', '{"prompt": 5}'], r"bad, line 2: Expected `str \| array \| null`.*prompt"),
        (['{"prompt": "a"}', "", '{"prompt": '], "bad, line 3: Input data was truncated"),
        (['{"text": "a"}'], "bad, line 1: needs one of prompt, messages and conversations, has 0"),
        (['{"prompt": "a", "messages": []}'], "bad, line 1: .* has 2"),
        (['{"prompt": "a", "max_tokens": 0}'], "bad, line 1: 0 output tokens"),
        (['{"messages": [{"role": "user", "content": "u"}]}'], "bad, line 1: messages need a protocol for chats"),
        (['[{"conversations": [{"from": "human"}]}]'], r"bad: .*missing required field `value`.*\[0\].conversations"),
        (["[{}]"], "bad, element 0: needs one of"),
        (["[]"], "bad has no prompts"),
        ([""], "bad has no prompts"),
    ],
)
def test_bad_files(lines: list[str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=problem):
        calls(dataset=write(tmp_path, "bad", *lines))


def test_more_bad_files(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"dataset: .*none.json: No such file"):
        calls(dataset=str(tmp_path / "none.json"))
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(LoadTestError, match="latin, line 1: "):
        calls(dataset=str(tmp_path / "latin"))
    with pytest.raises(LoadTestError, match=r"turns: .*line 1 is one request, not a conversation"):
        calls("openai-chat", dataset=write(tmp_path, "one", '{"prompt": "a"}'), turns=2)
