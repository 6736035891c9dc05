"""Tools and reasoning as the official client uses them, over an engine that writes what a model would write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.models import ModelParsers, choose_parsers
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from penstock.tokenizers.hf import FillInMiddle
from protocol.conftest import ServerThread
from support.dataplane import Setup

ANSWER = (
    "<think>They want the weather.</think>I will look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def tool(name: str, **fields: Any) -> Any:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters} | fields}


TOOLS = [tool("weather"), tool("time")]
ASKED: Any = {"model": "m", "messages": [{"role": "user", "content": "What is the weather?"}]}
CALLS = [("weather", '{"city": "Bern"}'), ("time", "{}")]


class Rig:
    def __init__(self, folder: Path) -> None:
        self.setup = Setup(folder, SchedulerConfig(), 256, answer=ANSWER)
        self.server = ServerThread(self.setup.plane, AppSettings(), ConnectionLimits()).start()
        self.server.do(self.setup.engine.start())
        self.setup.model.loaded = True
        self.url = f"http://127.0.0.1:{self.server.port}/v1"
        self.client = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def close(self) -> None:
        self.client.close()
        self.setup.engine.core.check_integrity()
        self.server.do(self.setup.engine.stop())
        self.server.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    running = Rig(tmp_path_factory.mktemp("model"))
    yield running
    running.close()


@pytest.fixture
def parsed(rig: Rig) -> Iterator[Callable[[str, str], None]]:
    def use(tools: str, reasoning: str) -> None:
        rig.setup.model.parsers = choose_parsers(tools, reasoning, None, rig.setup.tokenizer)

    use("hermes", "qwen3")
    yield use
    rig.setup.model.parsers = ModelParsers()


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def ask(rig: Rig, **fields: Any) -> Any:
    [choice] = rig.client.chat.completions.create(**ASKED | fields).choices
    return choice


@pytest.mark.usefixtures("parsed")
def test_a_call_of_tools(rig: Rig) -> None:
    choice = ask(rig, tools=TOOLS)
    message = choice.message
    assert (choice.finish_reason, message.content.strip(), calls_of(message)) == ("tool_calls", "I will look.", CALLS)
    assert message.reasoning_content == message.reasoning == "They want the weather."


@pytest.mark.usefixtures("parsed")
def test_a_stream_adds_up_to_the_same(rig: Rig) -> None:
    with rig.client.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
        done = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert (final.finish_reason, calls_of(final.message)) == ("tool_calls", CALLS)
    assert done == [name for name, _ in CALLS]
    assert (final.message.content or "").strip() == "I will look."
    chunks = [chunk.choices[0].delta for chunk in rig.client.chat.completions.create(**ASKED, tools=TOOLS, stream=True)]
    assert "".join(getattr(delta, "reasoning", "") for delta in chunks) == "They want the weather."


@pytest.mark.usefixtures("parsed")
def test_one_call_at_a_time(rig: Rig) -> None:
    assert calls_of(ask(rig, tools=TOOLS, parallel_tool_calls=False).message) == CALLS[:1]


@pytest.mark.usefixtures("parsed")
def test_without_tools_calls_are_text(rig: Rig) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "none"}, {"tool_choice": "auto"}):
        choice = ask(rig, **fields)
        assert choice.finish_reason == "stop"
        assert "<tool_call>" in choice.message.content
        assert choice.message.reasoning == "They want the weather."


@pytest.mark.usefixtures("parsed")
def test_reasoning_can_be_left_out(rig: Rig) -> None:
    message = ask(rig, extra_body={"include_reasoning": False}).message
    assert not hasattr(message, "reasoning")
    assert message.content.startswith("I will look.")


def test_without_parsers_all_is_text(rig: Rig) -> None:
    assert ask(rig).message.content == ANSWER[: len(ask(rig).message.content)]
    with pytest.raises(openai.BadRequestError, match="--tool-parser") as refused:
        ask(rig, tools=TOOLS)
    assert refused.value.param == "tools"
    assert ask(rig, reasoning_effort="low").message.content == ask(rig).message.content


@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"tools": [tool("no blanks")]}, "tools[0].function.name"),
        ({"tools": [tool("a", parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", strict=True)]}, "tools"),
        ({"tools": [tool(f"t{n}") for n in range(513)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "tools[0]"),
    ],
)
def test_what_is_refused(rig: Rig, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(rig.url + "/chat/completions", json=ASKED | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_conversation_goes_on_with_what_tools_said(rig: Rig) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "5 o'clock"},
    ]
    assert ask(rig, messages=messages).message.content


def test_filling_in_the_middle(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = rig.setup.tokenizer
    asked: Any = {"model": "m", "prompt": ["def f(", "x"], "max_tokens": 3}
    with pytest.raises(openai.BadRequestError) as refused:
        rig.client.completions.create(**asked, suffix="):")
    assert (refused.value.param, refused.value.code) == ("suffix", "unsupported_parameter")
    assert len(rig.client.completions.create(**asked, suffix="").choices) == 2
    monkeypatch.setitem(vars(tokenizer), "fill_in_middle", FillInMiddle(20, 21, 22, frozenset({23}), (1,)))
    for stream in (False, True):
        answer = rig.client.completions.create(
            **asked, suffix="):", extra_body={"return_token_ids": True}, stream=stream
        )
        found = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        prompts = {choice.index: choice.prompt_token_ids for choice in found if hasattr(choice, "prompt_token_ids")}
        behind = tokenizer.encode("):", add_special_tokens=False)
        before = tokenizer.encode("def f(", add_special_tokens=False)
        assert prompts == {
            0: [1, 20, *before, 21, *behind, 22],
            1: [1, 20, *tokenizer.encode("x", add_special_tokens=False), 21, *behind, 22],
        }
    with pytest.raises(openai.BadRequestError, match="cannot be cut"):
        rig.client.completions.create(**asked, suffix="):", extra_body={"truncate_prompt_tokens": 3})


def test_filling_in_ends_at_the_families_tokens(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fourth = rig.setup.tokenizer.encode(ANSWER, add_special_tokens=False)[3]
    fills = FillInMiddle(20, 21, 22, frozenset({fourth}))
    monkeypatch.setitem(vars(rig.setup.tokenizer), "fill_in_middle", fills)
    for suffix, reason, count in (("b", "stop", 4), ("", "length", 9)):
        answer = rig.client.completions.create(model="m", prompt="a", suffix=suffix, max_tokens=9)
        assert answer.choices[0].finish_reason == reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == count
