"""A request for a model of another server, as a chat of OpenAI's API."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.anthropic.conversation import continues, template_messages
from penstock.gateway.anthropic.schemas import MessagesRequest, OutputConfig
from penstock.gateway.anthropic.thinking import ENABLED, thinking_budget
from penstock.gateway.anthropic.tools import OfferedTools, offered_tools
from penstock.gateway.generating.other_chats import OtherChat, chat_fields


def other_chat(request: MessagesRequest) -> OtherChat:
    """Raises InvalidRequestError, and UnsupportedError for what OpenAI's API cannot say."""
    messages = template_messages(request.system, request.messages)
    if continues(messages):
        message = "messages: the answer of the other server's model cannot go on with an assistant's message."
        raise UnsupportedError(message, param="messages")
    if request.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1.", param="max_tokens")
    user = request.metadata.user_id if request.metadata is not None else None
    given = {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": user,
        **_tool_fields(request, offered_tools(request.tools, request.tool_choice)),
        **_thinking_fields(request),
        **_output_fields(request.output_config),
    }
    shows = request.thinking is None or request.thinking.display != "omitted"
    return OtherChat(chat_fields(given, messages), show_reasoning=shows)


def _tool_fields(request: MessagesRequest, offered: OfferedTools) -> dict[str, Any]:
    if not offered.shown:
        return {}
    for shown, given in zip(offered.shown, request.tools or (), strict=True):
        if given.get("strict") is not None:
            shown["function"]["strict"] = given["strict"]
    use = offered.use
    choice: Any = "required" if use.is_forced else "auto"
    if use.is_named:
        choice = {"type": "function", "function": {"name": use.tools[0].name}}
    disabled = request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use
    return {"tools": offered.shown, "tool_choice": choice, "parallel_tool_calls": False if disabled else None}


def _thinking_fields(request: MessagesRequest) -> dict[str, Any]:
    """`adaptive` is what servers do anyway. OpenAI has no field for the rest; vLLM and others have these."""
    thinking = request.thinking
    if thinking is None:
        return {}
    if thinking.type not in ENABLED:
        raise InvalidRequestError("thinking.type must be enabled, adaptive or disabled.", param="thinking.type")
    budget = thinking_budget(thinking, request.max_tokens)
    kwargs = None if thinking.type == "adaptive" else {"enable_thinking": ENABLED[thinking.type]}
    return {"chat_template_kwargs": kwargs, "thinking_token_budget": None if budget is None else budget.tokens}


def _output_fields(output: OutputConfig | None) -> dict[str, Any]:
    if output is None:
        return {}
    fields: dict[str, Any] = {"reasoning_effort": output.effort}
    if output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields
