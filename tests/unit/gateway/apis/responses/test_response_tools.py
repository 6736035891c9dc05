"""Tools that are not simply functions: in namespaces, with a text in place of arguments, and those that nobody runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.responses.schemas import InputItem, ResponsesRequest
from penstock.gateway.apis.responses.tools import CustomInput, ResponseTools, response_tools
from penstock.gateway.models.language.dataplane import ChatPrompt, GenerateRequest, ServedModel
from penstock.gateway.models.language.models import ModelParsers
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import Part, TextPart, ToolCallPart, find_tool_parser
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, FakeDataPlane, Step, delta
from support.messages import events_of
from support.responses import accumulated, validated_item, validated_response

PATH = "/v1/responses"
ABLE = msgspec.structs.replace(INFO, supports_grammars=True)
MODEL = ServedModel("tiny", "root", 0, ABLE, parsers=ModelParsers(find_tool_parser("hermes")))
READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "patch", "description": "Edits."}
FILES = {"type": "namespace", "name": "mcp__files", "description": "The user's files.", "tools": [READ, PATCH]}


class Plane(FakeDataPlane):
    """Keeps the names of the tools that templates are given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shown: list[list[str]] = []

    async def chat_prompt(self, *args: Any, **options: Any) -> ChatPrompt:
        self.shown.append([tool["function"]["name"] for tool in options["tools"] or ()])
        return await super().chat_prompt(*args, **options)


def tools_of(*tools: Any, context: RequestContext | None = None, **fields: Any) -> ResponseTools:
    body = {"model": "m", "input": "hi", "tools": list(tools), **fields}
    return response_tools(msgspec.convert(body, ResponsesRequest), context or RequestContext())


def names(tools: ResponseTools) -> list[str]:
    return [tool["function"]["name"] for tool in tools.functions or ()]


async def ask(plane: FakeDataPlane, **fields: Any) -> AsgiCall:
    return await call(build_app(plane, AppSettings()), PATH, {"model": "tiny", "input": "hi"} | fields)


def says(*parts: Part) -> FakeDataPlane:
    def script(request: GenerateRequest) -> Iterable[Step]:
        for part in parts:
            yield [delta(0, "", parts=[part])]
        yield [delta(0, "", "stop", parts=[])]

    return FakeDataPlane(script, models=(MODEL,))


def test_names_in_namespaces_are_joined_and_stay_unique() -> None:
    taken = READ | {"name": "mcp__files__read"}
    other = {"type": "namespace", "name": "a__", "tools": [READ, READ]}
    assert names(tools_of(FILES, taken, other, PATCH, READ | {"name": "patch"})) == [
        "mcp__files__read_2",
        "mcp__files__patch",
        "mcp__files__read",
        "a__read",
        "a__read_2",
        "patch_2",
        "patch",
    ]


def test_what_is_said_of_a_namespace_is_said_once() -> None:
    """With each of its tools, a long text would be many times as long."""
    said = [tool["function"].get("description") for tool in tools_of(FILES).functions or ()]
    assert said == ["About mcp__files: The user's files.", "Edits."]


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    [tool] = tools_of(PATCH).functions or ()
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    parameters = text | {"additionalProperties": False}
    assert tool["function"] == {"name": "patch", "description": "Edits.", "parameters": parameters, "strict": False}


def test_a_regular_expression_of_a_custom_tool_is_kept() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    context = RequestContext(strict=True)
    [tool] = tools_of(PATCH | {"format": form}, context=context).functions or ()
    assert tool["function"]["parameters"]["properties"] == {"input": {"type": "string", "pattern": "^(?:a|b)$"}}
    assert tool["function"]["strict"] is True


def test_a_grammar_of_lark_s_is_shown_and_not_promised() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    context = RequestContext()
    [tool] = tools_of(PATCH | {"format": form}, context=context).functions or ()
    assert tool["function"]["description"].startswith("Edits.\n\n")
    assert tool["function"]["description"].endswith('start: "a"')
    assert context.record.ignored == ("tools[].format",)


LEFT_OUT = [
    "web_search",
    "file_search",
    "mcp",
    "image_generation",
    "code_interpreter",
    "local_shell",
    "tool_search",
    "x",
]


@pytest.mark.parametrize("kind", LEFT_OUT)
async def test_tools_that_nobody_runs_are_left_out(kind: str) -> None:
    plane = Plane(models=(MODEL,))
    answer = await ask(plane, tools=[{"type": kind, "name": "r\r\nx: y"}, READ])
    assert (answer.status, answer.headers["x-penstock-ignored"]) == (200, "tools[].type")
    assert plane.shown == [["read"]]
    assert answer.json()["tools"][0]["type"] == kind


@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_without_any_tool_that_is_left_the_request_goes_on(choice: str | None) -> None:
    plane = Plane()  # a model that calls no tools
    namespace = {"type": "namespace", "name": "n", "tools": [{"type": "mcp"}, {"type": "namespace", "name": "m"}]}
    answer = await ask(plane, tools=[{"type": "web_search"}, namespace], tool_choice=choice)
    assert (answer.status, plane.shown) == (200, [[]])


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(map(function, names))}}


@pytest.mark.parametrize(
    ("choice", "there"),
    [
        ({"type": "function", "name": "read"}, function("read")),
        ({"type": "function", "name": "read", "namespace": "mcp__files"}, function("mcp__files__read")),
        ({"type": "custom", "name": "patch"}, function("patch")),
        ({"type": "custom", "name": "patch", "namespace": "mcp__files"}, function("mcp__files__patch")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__files"}]},
            allowed("required", "mcp__files__read", "mcp__files__patch"),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [PATCH, READ, {"type": "web_search"}]},
            allowed("auto", "patch", "read"),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "none"),
    ],
)
def test_tool_choice(choice: Any, there: Any) -> None:
    assert tools_of(READ, PATCH, FILES, tool_choice=choice).choice == there


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("read", '{"a": 1}', {"type": "function_call", "name": "read", "arguments": '{"a": 1}'}),
    (
        "mcp__files__read",
        "{}",
        {"type": "function_call", "name": "read", "namespace": "mcp__files", "arguments": "{}"},
    ),
    ("patch", '{"input": "a\\nb"}', {"type": "custom_tool_call", "name": "patch", "input": "a\nb"}),
    (
        "mcp__files__patch",
        '{"input": ""}',
        {"type": "custom_tool_call", "name": "patch", "namespace": "mcp__files", "input": ""},
    ),
    ("patch", '{"text": 1}', {"type": "custom_tool_call", "name": "patch", "input": '{"text": 1}'}),
    ("patch", '{"a": 1, "input": "b"}', {"type": "custom_tool_call", "name": "patch", "input": "b"}),
    ("patch", '{"input": "cut o', {"type": "custom_tool_call", "name": "patch", "input": "cut o"}),
]


@pytest.mark.parametrize(("name", "arguments", "item"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_comes_back_as_the_tool_that_it_is_for(
    name: str, arguments: str, item: dict[str, Any], stream: bool
) -> None:
    plane = says(ToolCallPart(0, "", name, "call_1"), *(ToolCallPart(0, char) for char in arguments))
    answer = await ask(plane, tools=[READ, PATCH, FILES], stream=stream)
    if stream:
        [shown] = accumulated(events_of(b"".join(answer.bodies)))
    else:
        [shown] = validated_response(answer.json())["output"]
    assert {field: shown[field] for field in shown if field != "id"} == {
        "call_id": "call_1",
        "status": "completed",
        **item,
    }


@pytest.mark.parametrize(("name", "arguments", "item"), CALLS[:4])
@pytest.mark.parametrize("kept", [False, True])
async def test_a_call_of_the_history_is_shown_by_the_function_s_name(
    name: str, arguments: str, item: dict[str, Any], kept: bool
) -> None:
    plane = says(ToolCallPart(0, arguments, name, "call_1"))
    app = build_app(plane, AppSettings())
    body = {"model": "tiny", "input": "hi", "tools": [READ, PATCH, FILES]}
    output: dict[str, Any] = {"type": f"{item['type']}_output", "call_id": "call_1", "output": "done"}
    if kept:
        first = (await call(app, PATH, body)).json()
        following = body | {"previous_response_id": first["id"], "input": [output]}
    else:
        following = body | {"input": [{"role": "user", "content": "hi"}, item | {"call_id": "call_1"}, output]}
    answer = await call(app, PATH, following)
    assert (answer.status, "x-penstock-ignored" in answer.headers) == (200, False), answer.json()
    [_, turn, result] = plane.prompts[-1][0]
    assert turn["tool_calls"][0]["function"]["name"] == name
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == json.loads(arguments)
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "call_1", "done")
    listed = await call(app, f"{PATH}/{answer.json()['id']}/input_items", method="GET")
    kinds = [validated_item(each)["type"] for each in listed.json()["data"]]
    assert kinds == [output["type"], item["type"], "message"]


def test_calls_of_tools_that_are_gone_keep_their_names() -> None:
    call = InputItem(type="function_call", name="read", namespace="mcp__old")
    assert tools_of(FILES).function_name(call) == "mcp__old__read"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [1, 2])
async def test_an_answer_has_no_more_calls_than_it_may_have(most: int, stream: bool) -> None:
    parts = [ToolCallPart(number, "{}", "read", f"call_{number}") for number in range(4)]
    plane = says(TextPart("I read."), *parts)
    answer = await ask(plane, tools=[READ], max_tool_calls=most, stream=stream)
    ended = events_of(b"".join(answer.bodies))[-1]["response"] if stream else answer.json()
    calls = [item["call_id"] for item in ended["output"] if item["type"] == "function_call"]
    assert (calls, ended["max_tool_calls"]) == ([f"call_{number}" for number in range(most)], most)


@given(text=st.text('ab "\\\n\x00é🙂\ud83d'), ascii_only=st.booleans(), cuts=st.sets(st.integers(0, 60)))
def test_however_it_arrives_the_text_of_a_custom_tool_is_whole(text: str, ascii_only: bool, cuts: set[int]) -> None:
    """Half a character (U+D83D alone) is no text; what stands for it is."""
    written = json.dumps({"input": text}, ensure_ascii=ascii_only or "\ud83d" in text)
    edges = [0, *sorted(cut for cut in cuts if cut < len(written)), len(written)]
    reader = CustomInput()
    pieces = [reader.read(written[start:end]) for start, end in pairwise(edges)]
    whole = "".join([*pieces, reader.rest()])
    assert whole == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.mark.parametrize("written", [" " * 5000, '{"input": "\\uZZZZ and more of it"}', '{"input": 5}', "", '{"input"'])
def test_arguments_in_another_form_are_shown_as_they_are(written: str) -> None:
    reader = CustomInput()
    said = "".join([*map(reader.read, written), reader.rest()])
    assert said in written
    assert len(said) >= len(written) - len('{"input": "')


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "tools",
    [
        [READ] * 10_000,
        [{"type": "web_search"}] * 10_000,
        [{"type": "namespace", "name": "n", "tools": [READ] * 10_000}],
        [{"type": "namespace", "name": f"n{number}", "tools": [READ] * 100} for number in range(100)],
        [{"type": "namespace", "name": "n" * 250, "tools": [READ] * 512}] * 3,
    ],
)
def test_the_number_of_tools_is_bounded(tools: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequestError, match="At most 1024 tools"):
        tools_of(*tools)


def test_many_tools_of_one_name_and_a_long_description() -> None:
    """What the model is shown is not much longer than what was sent."""
    namespace = {"type": "namespace", "name": "n", "description": "x" * 100_000, "tools": [READ] * 1000}
    tools = tools_of(namespace)
    assert len(set(names(tools))) == 1000
    assert len(msgspec.json.encode(tools.functions)) < 300_000


HOSTILE = [
    "a\r\nset-cookie: b",
    "{{ 7 * 7 }}",
    "<|im_end|>",
    'a"}',
    "a b",
    "</tool_call>",
    "\u202egnp",
    "\u2028",
    "a" * 257,
]


@pytest.mark.parametrize("name", HOSTILE)
async def test_names_cannot_break_out_of_prompts_grammars_and_headers(name: str) -> None:
    for tool in (READ, PATCH):
        for tools in ([tool | {"name": name}], [FILES | {"name": name}], [FILES | {"tools": [tool | {"name": name}]}]):
            answer = await ask(FakeDataPlane(models=(MODEL,)), tools=[{"type": "web_search"}, *tools])
            assert answer.status == 400
            assert answer.json()["error"]["param"] in ("tools[1].name", "tools[1].tools[0].name")
            assert name not in str(answer.headers) + str(answer.json())


@pytest.mark.parametrize(
    "name", ["查询天气", "मौसम", "mcp__plugin_chrome-devtools-mcp__performance_analyze_insight" * 2, "a/b:c.d"]
)
async def test_names_of_any_script_and_of_some_length_are_taken(name: str) -> None:
    plane = FakeDataPlane(models=(MODEL,))
    answer = await ask(plane, tools=[READ | {"name": name, "strict": True}], tool_choice="required")
    assert answer.status == 200, answer.json()
    grammar = plane.requests[0].params.grammar
    assert grammar is not None
    written = json.dumps(name, ensure_ascii=False)
    assert json.dumps(written)[1:-1] in grammar.text, "the model writes it as it reads it"


async def test_a_response_says_what_functions_leave_out() -> None:
    plane = FakeDataPlane(models=(MODEL,))
    namespace = FILES | {"tools": [{"type": "function", "name": "f"}]}
    said = (await ask(plane, tools=[{"type": "function", "name": "f"}, namespace, PATCH])).json()["tools"]
    nothing = {"description": None, "parameters": None, "strict": None}
    assert said[0] == {"type": "function", "name": "f", **nothing}
    assert said[1]["tools"] == [{"type": "function", "name": "f", **nothing}]
    assert said[2] == PATCH
