"""What Ollama's clients see of an answer, however it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from penstock.gateway.apis.ollama.answers import OllamaLines
from penstock.gateway.models.language.dataplane import ChoiceDelta
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart


@dataclass
class Counts:
    prompt_tokens: int = 3
    completion_tokens: int = 4
    cached_tokens: int = 0


def delta(*parts: Part, end: str | None = None) -> ChoiceDelta:
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return ChoiceDelta(index=0, text=text, token_ids=[1], parts=parts, finish_reason=end)


def messages(*deltas: ChoiceDelta) -> list[dict[str, object]]:
    lines = OllamaLines("m", RequestContext(), Counts(), is_chat=True)  # type: ignore[arg-type]
    sent = b"".join([lines.render([each]) for each in deltas]) + lines.ending()
    return [json.loads(line)["message"] for line in sent.splitlines()]


def call(index: int, arguments: str, name: str | None = None) -> ToolCallPart:
    return ToolCallPart(index=index, arguments=arguments, name=name, id=None)


def shown(name: str, **arguments: object) -> dict[str, object]:
    return {"function": {"name": name, "arguments": arguments}}


def test_calls_are_sent_when_they_are_whole() -> None:
    found = messages(
        delta(ReasoningPart("Hm.")),
        delta(TextPart("I look.")),
        delta(call(0, '{"city"', "weather")),
        delta(call(0, ': "Oslo"}'), call(1, "", "time")),
        delta(call(1, "{}"), end="tool_calls"),
    )
    assert [each.get("thinking") for each in found] == ["Hm.", None, None, None, None]
    assert [each.get("content") for each in found] == ["", "I look.", "", "", ""]
    calls = [each["tool_calls"] for each in found if "tool_calls" in each]
    assert calls == [[shown("weather", city="Oslo")], [shown("time")]]


def test_a_call_that_is_cut_off_or_too_deep_is_left_out() -> None:
    for arguments in ('{"city": "Os', '{"cities":' + "[" * 5000 + "]" * 5000 + "}"):
        found = messages(delta(call(0, arguments, "weather"), end="length"))
        assert not any(each.get("tool_calls") for each in found)
