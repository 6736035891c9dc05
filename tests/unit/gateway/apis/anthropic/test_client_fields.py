"""Tools, hints and lengths as Anthropic's clients send them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from penstock.engines.errors import ContextLengthError
from penstock.gateway.apis.anthropic.chat import thinking_budget
from penstock.gateway.apis.anthropic.schemas import MessagesRequest, ToolChoice
from penstock.gateway.apis.anthropic.tools import offered_tools
from penstock.gateway.generating.answer_shape import AskedBudget
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.models.language.models import NO_PARSERS, ModelParsers
from penstock.gateway.requests.call import RequestJournal, be_strict
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import find_reasoning_parser, find_tool_parser
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, FakeDataPlane, delta

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = {"role": "user", "content": "hi"}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
FUNCTION = {"name": "time", "input_schema": {"type": "object"}}
TOOLS = ServedModel("tiny", "root", 0, INFO, parsers=ModelParsers(find_tool_parser("hermes")))
"""It does not think."""
LIMIT = INFO.context_length


async def ask(fields: dict[str, Any], path: str = PATH, script: Any = None, **settings: Any) -> AsgiCall:
    dataplane = FakeDataPlane(models=(TOOLS,)) if script is None else FakeDataPlane(script, models=(TOOLS,))
    body = {"model": "tiny", "max_tokens": 5, "messages": [HI], **fields}
    return await call(build_app(dataplane, AppSettings(**settings)), path, body)


HINTS: list[tuple[dict[str, Any], str]] = [
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens, thinking"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 2}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "display": 5}}, "thinking.display"),
    ({"output_config": {"effort": "high"}}, "output_config.effort"),
    ({"output_config": {"effort": ["high"]}}, "output_config.effort"),
    ({"container": "c"}, "container"),
    ({"container": {"id": None, "skills": []}}, "container"),
    ({"mcp_servers": [{"type": "url", "url": "https://a", "name": "a"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"speed": "fast"}, "speed"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"metadata": 5}, "metadata"),
    ({"metadata": {"user_id": 5}}, "metadata"),
    ({"cache_control": {"type": "persistent"}}, "cache_control"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control"),
    ({"cache_control": {"type": "ephemeral", "ttl": []}}, "cache_control"),
    ({"cache_control": "yes"}, "cache_control"),
    ({"tools": [FUNCTION | {"cache_control": 5}]}, "cache_control"),
    ({"tools": [FUNCTION, WEB]}, "tools[]"),
    ({"tools": [WEB, {"type": "mcp_toolset", "mcp_server_name": "a"}]}, "tools[]"),
    ({"tools": [{"type": ["x"]}]}, "tools[]"),
]


@pytest.mark.parametrize(("fields", "names"), HINTS)
async def test_hints_never_cost_a_request(fields: dict[str, Any], names: str) -> None:
    answer = await ask(fields)
    assert (answer.status, answer.headers.get("x-penstock-ignored")) == (200, names), answer.json()
    assert (await ask(fields, COUNT)).status == 200


@pytest.mark.parametrize(("fields", "names"), HINTS)
async def test_a_strict_server_refuses_them(fields: dict[str, Any], names: str) -> None:
    answer = await ask(fields, journal=RequestJournal(on_begin=[be_strict]))
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "disabled"}},
        {"context_management": {"edits": []}, "mcp_servers": [], "container": None, "speed": "standard"},
        {"metadata": {"user_id": "me", "more": [1]}, "service_tier": "standard_only"},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "betas": ["x"], "anthropic_beta": ["y"]},
        {"tools": [FUNCTION | {"type": "custom", "defer_loading": True, "eager_input_streaming": True}]},
        {"tools": [{"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}}]},
    ],
)
async def test_nothing_is_noted_of_what_is_used_whole(fields: dict[str, Any]) -> None:
    answer = await ask(fields, journal=RequestJournal(on_begin=[be_strict]))
    assert (answer.status, "x-penstock-ignored" in answer.headers) == (200, False)


@pytest.mark.parametrize("name", ["查询天气", "हिन्दी", "mcp__" + "x" * 251, "files:read/all", "é", "天" * 256])
async def test_names_of_tools_may_be_long_and_of_any_script(name: str) -> None:
    [tool] = offered_tools([FUNCTION | {"name": name}], None, RequestContext()).use.tools
    assert tool.name == name
    assert (await ask({"tools": [FUNCTION | {"name": name}]})).status == 200


COMMANDS = ["view", "create", "str_replace", "insert"]


@pytest.mark.parametrize(
    ("kind", "name", "commands"),
    [
        ("text_editor_20241022", "str_replace_editor", [*COMMANDS, "undo_edit"]),
        ("text_editor_20250124", "str_replace_editor", [*COMMANDS, "undo_edit"]),
        ("text_editor_20250429", "str_replace_based_edit_tool", COMMANDS),
        ("text_editor_20250728", "str_replace_based_edit_tool", COMMANDS),
        ("text_editor_20991231", "str_replace_based_edit_tool", COMMANDS),
        ("memory_20250818", "memory", [*COMMANDS, "delete", "rename"]),
    ],
)
def test_editors_of_anthropic_are_functions(kind: str, name: str, commands: list[str]) -> None:
    given = {"type": kind, "name": name, "max_characters": 100, "strict": True}
    [tool] = offered_tools([given], ToolChoice("auto"), RequestContext(strict=True)).use.tools
    assert tool.parameters is not None
    assert (tool.name, tool.strict, tool.parameters["properties"]["command"]["enum"]) == (name, True, commands)


def test_the_shell_of_anthropic_is_a_function() -> None:
    given = [{"type": kind, "name": "bash"} for kind in ("bash_20241022", "bash_20250124")]
    offered = offered_tools(given[:1], None, RequestContext(strict=True))
    assert offered.use.tools == offered_tools(given[1:], None, RequestContext(strict=True)).use.tools
    assert offered.shown is not None
    function = offered.shown[0]["function"]
    assert (function["name"], list(function["parameters"]["properties"])) == ("bash", ["command", "restart"])
    named = offered_tools([*given[:1], WEB], ToolChoice("tool", "bash"), RequestContext())
    assert [tool.name for tool in named.use.tools] == ["bash"]
    assert offered_tools([{"type": "bash_20250124"}], None, RequestContext()).use.tools == offered.use.tools


@pytest.mark.parametrize("kind", ["computer_20250124", "computer_toolset_20260801", "bash", "memory_2025", "", 5, {}])
def test_tools_that_nobody_here_runs_are_left_out(kind: Any) -> None:
    context = RequestContext()
    offered = offered_tools([{"type": kind, "name": "computer", "display_width_px": 5}, FUNCTION], None, context)
    assert ([tool.name for tool in offered.use.tools], context.record.ignored) == (["time"], ("tools[]",))


def test_a_type_that_nobody_knows_is_a_function_where_it_has_a_schema() -> None:
    offered = offered_tools([FUNCTION | {"type": "function"}], None, RequestContext(strict=True))
    assert [tool.name for tool in offered.use.tools] == ["time"]


THINKS = ModelParsers(reasoning=find_reasoning_parser("qwen3"))
BUDGETS: list[tuple[str, int, int, ModelParsers, int | None]] = [
    ("enabled", 50, 100, THINKS, 50),
    ("adaptive", 50, 100, THINKS, 50),
    ("enabled", 0, 100, THINKS, 0),
    ("enabled", 100, 100, THINKS, None),  # `max_tokens` keeps it
    ("enabled", 500, 100, THINKS, None),
    ("disabled", 50, 100, THINKS, None),
    ("enabled", 50, 100, NO_PARSERS, None),
    ("enabled", -1, 100, NO_PARSERS, None),
]


@pytest.mark.parametrize(("kind", "tokens", "max_tokens", "parsers", "bound"), BUDGETS)
def test_budgets_bind_models_that_think(
    kind: str, tokens: int, max_tokens: int, parsers: ModelParsers, bound: int | None
) -> None:
    body = {"model": "m", "messages": [], "max_tokens": 1, "thinking": {"type": kind, "budget_tokens": tokens}}
    thinking = msgspec.convert(body, MessagesRequest).thinking
    budget = thinking_budget(thinking, max_tokens, RequestContext(), parsers)
    assert budget == (None if bound is None else AskedBudget(bound, "thinking.budget_tokens"))


def says(length: int) -> dict[str, Any]:
    """A prompt of so many tokens."""
    return {"messages": [{"role": "user", "content": "x" * length}]}


CLAUDE_CODE = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")
"""What it reads, to ask again with smaller `max_tokens`."""


@pytest.mark.parametrize(("prompt", "max_tokens"), [(LIMIT - 4, 17), (LIMIT - 1, 5), (10, 1000)])
async def test_too_little_room_is_said_in_the_words_that_claude_code_reads(prompt: int, max_tokens: int) -> None:
    answer = await ask(says(prompt) | {"max_tokens": max_tokens})
    error = answer.json()["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    numbers = CLAUDE_CODE.match(error["message"])
    assert numbers is not None, error
    assert [int(each) for each in numbers.groups()] == [prompt, max_tokens, LIMIT]
    assert error["message"].endswith(", decrease input length or `max_tokens` and try again")


@pytest.mark.parametrize("prompt", [LIMIT, LIMIT + 100])
async def test_a_prompt_that_does_not_fit_is_said_in_anthropic_s_words(prompt: int) -> None:
    answer = await ask(says(prompt))
    assert answer.status == 400
    assert answer.json()["error"]["message"] == f"prompt is too long: {prompt} tokens > {LIMIT - 1} maximum"
    assert (await ask(says(prompt), COUNT)).json() == {"input_tokens": prompt}


async def test_a_prompt_that_nobody_counts_is_too_long_as_well() -> None:
    class Unread(FakeDataPlane):
        async def chat_prompt(self, *given: Any, cut: bool = False, **more: Any) -> Any:
            assert not cut
            raise ContextLengthError("more characters than are expected to fit", param="prompt")

    body = {"model": "tiny", "max_tokens": 5, **says(16 * LIMIT)}
    for path in (PATH, COUNT):
        answer = await call(build_app(Unread(models=(TOOLS,)), AppSettings()), path, body)
        assert answer.json()["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "left", "reason"),
    [
        (LIMIT - 4, 16, 4, "model_context_window_exceeded"),
        (2, LIMIT, LIMIT - 2, "model_context_window_exceeded"),
        (LIMIT - 5, 5, 5, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_has_what_the_context_leaves(
    prompt: int, max_tokens: int, left: int, reason: str, stream: bool
) -> None:
    limits = []

    def script(request: Any) -> Any:
        limits.append(request.params.max_tokens)
        yield [delta(0, "a", "length")]

    answer = await ask(says(prompt) | {"max_tokens": max_tokens, "stream": stream}, script=script)
    assert (answer.status, limits) == (200, [left])
    assert f'"stop_reason":"{reason}"'.encode() in b"".join(answer.bodies)
