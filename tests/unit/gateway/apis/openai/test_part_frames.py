"""Chunks of a chat that has more than text."""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.apis.openai.frames import PartFrames
from penstock.gateway.apis.openai.objects import ResponseHead, message
from penstock.gateway.models.language.dataplane import ChoiceDelta
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart


def delta(*parts: Part, finish: str | None = None, index: int = 0) -> ChoiceDelta:
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return ChoiceDelta(index, text, [7, 8], finish, parts=parts)


def frames(choices: int = 1, **fields: Any) -> PartFrames:
    return PartFrames(ResponseHead("id", "chat.completion.chunk", 0, "m", "f"), choices, opening=b'"delta":', **fields)


def choices_of(data: bytes) -> list[dict[str, Any]]:
    events = data.decode().split("\n\n")
    return [choice for event in events if event for choice in json.loads(event.removeprefix("data: "))["choices"]]


def shown(index: int, delta_fields: dict[str, Any], finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta_fields, "logprobs": None, "finish_reason": finish, **fields}


def test_each_part_has_a_chunk_and_the_last_has_what_belongs_to_the_delta() -> None:
    made = frames(extra=lambda each: {"token_ids": each.token_ids})
    data = made.render([delta(ReasoningPart("a"), TextPart("b"), ReasoningPart("c"))])
    assert choices_of(data) == [
        shown(0, {"reasoning_content": "a", "reasoning": "a"}),
        shown(0, {"content": "b"}),
        shown(0, {"reasoning_content": "c", "reasoning": "c"}, token_ids=[7, 8]),
    ]


def test_the_model_s_own_ids_are_kept() -> None:
    parts = (ToolCallPart(0, "", "look", "functions.look:0"), ToolCallPart(0, "{"), ToolCallPart(0, "}"))
    head = {"index": 0, "id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": ""}}
    assert choices_of(frames().render([delta(*parts)])) == [
        shown(0, {"tool_calls": [head]}),
        shown(0, {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}),
        shown(0, {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}),
    ]
    [call] = message("", parts).tool_calls or []
    assert (call.id, call.function.name, call.function.arguments) == ("functions.look:0", "look", "{}")


def test_only_the_choice_that_called_ends_with_tool_calls() -> None:
    made = frames(2)
    made.render([delta(ToolCallPart(0, "{}", "look"), index=1)])
    assert made.live == 2
    ended = made.render([delta(finish="stop", index=0), delta(finish="stop", index=1)])
    assert choices_of(ended) == [
        shown(0, {"content": ""}, "stop", stop_reason=None),
        shown(1, {"content": ""}, "tool_calls", stop_reason=None),
    ]
    assert made.live == 0


def test_a_call_that_comes_with_the_end_has_a_chunk_of_its_own() -> None:
    ended = choices_of(frames().render([delta(ToolCallPart(0, "{}", "look"), finish="stop")]))
    assert [sorted(choice["delta"]) for choice in ended] == [["tool_calls"], ["content"]]
    assert [choice["finish_reason"] for choice in ended] == [None, "tool_calls"]


def test_every_chunk_has_the_usage_so_far() -> None:
    made = frames(usage=lambda index: {"of": index})
    events = made.render([delta(ReasoningPart("a"), TextPart("b"))]).decode().split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["usage"] for event in events if event] == [{"of": 0}] * 2


def test_a_message_of_calls_alone_has_no_content() -> None:
    assert message("", [ToolCallPart(0, "{}", "look")]).content is None
    assert message("", [ReasoningPart("a")]).content == ""
    assert message("", []).content == ""
