"""What a request asks for, apart from its input, as a request of the chat front, which checks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.llm.sampling import SamplingFields
from penstock.gateway.llm.structured_output import JsonSchema, ResponseFormat
from penstock.gateway.openai.schemas import ChatRequest
from penstock.gateway.responses.include import LOGPROBS, Include
from penstock.gateway.responses.schemas import Reasoning, ResponsesRequest, TextOptions

_SAMPLING = tuple(field for field in SamplingFields.__struct_fields__ if field not in ("max_tokens", "response_format"))


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Still without messages. Raises InvalidRequestError, UnsupportedError."""
    logprobs = Include.parse(request.include).logprobs
    if request.top_logprobs and not logprobs:
        raise InvalidRequestError(f"top_logprobs needs {LOGPROBS} in include.", param="top_logprobs")
    return ChatRequest(
        model=request.model,
        messages=[],
        max_completion_tokens=request.max_output_tokens,
        tools=_tools(request.tools),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=_effort(request.reasoning),
        response_format=_response_format(request.text),
        logprobs=logprobs,
        top_logprobs=request.top_logprobs,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        service_tier=request.service_tier,
        verbosity=request.text.verbosity if request.text is not None else None,
        metadata=request.metadata,
        priority=request.priority,
        cache_salt=request.cache_salt,
        chat_template_kwargs=request.chat_template_kwargs,
        thinking_token_budget=request.thinking_token_budget,
        max_reasoning_tokens=request.max_reasoning_tokens,
        **{name: getattr(request, name) for name in _SAMPLING},
    )


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The chat front wants what describes a function to stand apart."""
    for number, tool in enumerate(given or ()):
        where = f"tools[{number}]"
        if tool.get("type") != "function":
            raise UnsupportedError(f"{where}: only tools of type function are supported.", param=where)
    names = ("name", "description", "parameters", "strict")
    tools = [{"type": "function", "function": _some_of(tool, *names)} for tool in given or ()]
    return tools or None


def _tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(given, dict):
        return given
    match given:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": str(mode), "tools": list(tools)} if all(map(_is_function, tools)):
            named = [{"type": "function", "function": {"name": tool["name"]}} for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    raise InvalidRequestError(
        "tool_choice must be none, auto, required, or of type function or allowed_tools with the names of functions.",
        param="tool_choice",
    )


def _is_function(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)


def _some_of(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: fields[name] for name in names if fields.get(name) is not None}


def _effort(reasoning: Reasoning | None) -> Any:
    if reasoning is None:
        return None
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):
            message = f"reasoning.{name} may only be auto: reasoning is shown as it is, and not summarized."
            raise UnsupportedError(message, param=f"reasoning.{name}")
    return reasoning.effort


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None:
        return None
    given = text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ResponseFormat(type="json_object")
    if given.type != "json_schema":
        message = "text.format.type must be text, json_object or json_schema."
        raise InvalidRequestError(message, param="text.format.type")
    for name in ("name", "schema"):
        if getattr(given, name) is None:
            raise InvalidRequestError(f"text.format.{name} is missing.", param=f"text.format.{name}")
    schema = JsonSchema(name=given.name, description=given.description, schema=given.schema, strict=given.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
