"""Reads streams of the Responses API, and holds them to their rules and to the types of OpenAI's client."""

from __future__ import annotations

from typing import Any, get_args

import pydantic
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent

_EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
_ITEM: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseItem)
_UNTYPED = {"store", "bytes", "status", "presence_penalty", "frequency_penalty"}
"""What is sent although the client has no type for it: `bytes` it knows in items, and not in events; the `status` of a
call of a custom tool in lists, and not in outputs; the penalties are Open Responses'."""
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def validated(event: dict[str, Any]) -> dict[str, Any]:
    """The event, which is as its type says, with no field that the type does not know."""
    _known(_EVENTS[event["type"]].model_validate(event))
    return event


def validated_response(response: dict[str, Any]) -> dict[str, Any]:
    _known(Response.model_validate(response))
    return response


def validated_item(item: dict[str, Any]) -> dict[str, Any]:
    """One of a list of input items."""
    _known(_ITEM.validate_python(item))
    return item


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output, and the rules of a stream: numbers without gaps, items one behind the other, one end."""
    assert [validated(event)["sequence_number"] for event in events] == list(range(len(events)))
    if events[1]["type"] == "response.queued":  # in the background
        events = [events[0], *events[2:]]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] in _ENDS for event in events] == [False] * (len(events) - 1) + [True]
    output: list[dict[str, Any]] = []
    opened: _Item | None = None
    for event in events[2:-1]:
        if event["type"] == "response.output_item.added":
            assert opened is None
            assert event["output_index"] == len(output)
            opened = _Item(event["item"])
            continue
        assert opened is not None
        assert event["output_index"] == len(output)
        if event["type"] == "response.output_item.done":
            output.append(opened.ended(event["item"]))
            opened = None
        else:
            opened.take(event)
    assert opened is None
    assert events[-1]["response"]["output"] == output
    return output


class _Item:
    """One that has been opened."""

    def __init__(self, shown: dict[str, Any]) -> None:
        assert shown["status"] == "in_progress"
        self.shown = shown
        self.text = ""
        self.steps: list[str] = []

    def take(self, event: dict[str, Any]) -> None:
        assert event["item_id"] == self.shown["id"]
        step = event["type"].removeprefix("response.")
        if step.endswith(".delta"):
            self.text += event["delta"]
            assert event["delta"] or event["logprobs"]
        elif step == "content_part.done":
            assert event["part"]["text"] == self.text
        elif step.endswith(".done"):
            assert [event[name] for name in ("arguments", "input", "text") if name in event] == [self.text]
        if self.steps[-1:] != [step]:
            self.steps.append(step)

    def ended(self, shown: dict[str, Any]) -> dict[str, Any]:
        name = {"message": "output_text", "reasoning": "reasoning_text"}.get(shown["type"])
        if name is None:
            name = "custom_tool_call_input" if shown["type"] == "custom_tool_call" else "function_call_arguments"
            assert shown["input" if shown["type"] == "custom_tool_call" else "arguments"] == self.text
            steps = [f"{name}.delta", f"{name}.done"]
        else:
            assert [part["text"] for part in shown["content"]] == [self.text]
            steps = ["content_part.added", f"{name}.delta", f"{name}.done", "content_part.done"]
        silent = not self.text and f"{name}.delta" not in self.steps
        assert self.steps == [step for step in steps if not (silent and step.endswith(".delta"))]
        same = ("id", "type", "call_id", "name", "namespace", "role")
        assert [shown.get(field) for field in same] == [self.shown.get(field) for field in same]
        assert shown["status"] in ("completed", "incomplete")
        return shown


def _known(value: object) -> None:
    if isinstance(value, pydantic.BaseModel):
        unknown = set(value.model_extra or ()) - _UNTYPED
        assert not unknown, f"{type(value).__name__} has no {unknown}"
        for name in type(value).model_fields:
            _known(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            _known(each)
