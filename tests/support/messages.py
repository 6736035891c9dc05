"""Reads streams of the Anthropic Messages API, and holds them to their rules."""

from __future__ import annotations

import json
from typing import Any

import pytest


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The data of each event; it says the same type as the event's name."""
    found = []
    *frames, rest = data.decode().split("\n\n")
    assert rest == ""
    for frame in frames:
        name, body = frame.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content, and the rules of a stream: blocks one behind the other, numbered, and nothing outside of them."""
    content: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    opened: int | None = None
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert opened is None
                assert event["index"] == len(content)
                opened = event["index"]
                content.append(event["content_block"])
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
            case "content_block_delta":
                assert event["index"] == opened
                _apply(content[event["index"]], event["delta"], arguments, event["index"])
            case kind:
                assert kind == "ping"
    assert opened is None
    for index, text in arguments.items():
        content[index]["input"] = json.loads(text)
    return content


def _apply(block: dict[str, Any], piece: dict[str, Any], arguments: dict[int, str], index: int) -> None:
    match piece:
        case {"type": "text_delta", "text": text}:
            block["text"] += text
        case {"type": "thinking_delta", "thinking": text}:
            assert block["signature"] == "", "the signature comes last"
            block["thinking"] += text
        case {"type": "signature_delta", "signature": signature}:
            block["signature"] = signature
        case {"type": "input_json_delta", "partial_json": text}:
            arguments[index] = arguments.get(index, "") + text
        case _:
            pytest.fail(f"no such delta: {piece}")
