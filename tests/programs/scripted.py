"""A model that follows a script: it calls the tools that it is told to, one after another, then answers.

It is another server's model, so Penstock translates each program's API for it (docs/upstream.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from support.upstream import OK_HEAD, USAGE, Asked, BadServer, Caller, chunk, delta, event, json_answer, whole

MODEL = "scripted"


class Call(NamedTuple):
    tool: str
    arguments: dict[str, Any]


class ScriptedModel(BadServer):
    """`calls` are made in this order, each once its conversation has the results of those before. Then, and where it is
    offered no tools, the answer is `answer`."""

    def __init__(self, answer: str, *calls: Call) -> None:
        self._answer, self._calls = answer, calls
        super().__init__(self._play)

    @property
    def flag(self) -> str:
        """A value of `--upstream`."""
        return f"{MODEL}={self.url}"

    def results(self) -> list[str]:
        """What the tools have given back, in the latest conversation that has any."""
        conversations = [asked.body.get("messages", []) for asked in self.asked]
        results = [[text_of(m) for m in messages if m["role"] == "tool"] for messages in conversations]
        return next(filter(None, reversed(results)), [])

    async def _play(self, _: BadServer, asked: Asked, caller: Caller) -> None:
        body = asked.body
        number = sum(message["role"] == "tool" for message in body["messages"])
        if body.get("tools") and number < len(self._calls):
            message, end = _calling(self._calls[number], number), "tool_calls"
        else:
            message, end = {"content": self._answer}, "stop"
        caller.writer.write(_streamed(message, end) if body.get("stream") else _whole(message, end))


@contextmanager
def scripted(answer: str, *calls: Call) -> Iterator[ScriptedModel]:
    model = ScriptedModel(answer, *calls)
    try:
        yield model
    finally:
        model.stop()


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])


def _calling(call: Call, number: int) -> dict[str, Any]:
    function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
    return {"tool_calls": [{"index": 0, "id": f"call_{number}", "type": "function", "function": function}]}


def _streamed(message: dict[str, Any], end: str) -> bytes:
    first, last = delta(None), delta(None, end)
    first["choices"][0]["delta"] = {"role": "assistant"} | message
    frames = [event(first), event(last), event(USAGE), event("[DONE]")]
    return OK_HEAD + b"".join(map(chunk, frames)) + b"0\r\n\r\n"


def _whole(message: dict[str, Any], end: str) -> bytes:
    answer = whole("")
    answer["choices"][0] |= {"message": {"role": "assistant"} | message, "finish_reason": end}
    return json_answer(200, answer)
