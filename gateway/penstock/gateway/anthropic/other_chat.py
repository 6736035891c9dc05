"""A request for a model of another server, as a chat of OpenAI's API."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.anthropic.conversation import continues, template_messages
from penstock.gateway.anthropic.schemas import MessagesRequest, OutputFormat
from penstock.gateway.anthropic.thinking import ENABLED, asked_effort, check_thinking, shows_thoughts, thinking_budget
from penstock.gateway.anthropic.tools import OfferedTools, offered_tools
from penstock.gateway.anthropic.unsupported import note_hints, user_id
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.other_chats import OtherChat, chat_fields


def other_chat(request: MessagesRequest, context: RequestContext) -> OtherChat:
    """Raises InvalidRequestError, and UnsupportedError for what OpenAI's API cannot say."""
    messages = template_messages(request.system, request.messages, context)
    if continues(messages):
        message = "messages: the answer of the other server's model cannot go on with an assistant's message."
        raise UnsupportedError(message, param="messages")
    if request.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1.", param="max_tokens")
    note_hints(request, context)
    given = {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": user_id(request, context),
        **_tool_fields(request, offered_tools(request.tools, request.tool_choice, context)),
        **_thinking_fields(request, context),
        "reasoning_effort": asked_effort(request.output_config, context),
        **_format_fields(request.answer_format),
    }
    return OtherChat(chat_fields(given, messages), show_reasoning=shows_thoughts(request.thinking))


def _tool_fields(request: MessagesRequest, offered: OfferedTools) -> dict[str, Any]:
    if not offered.shown:
        return {}
    for shown, tool in zip(offered.shown, offered.definitions, strict=True):
        if tool.strict is not None:
            shown["function"]["strict"] = tool.strict
    use = offered.use
    choice: Any = "required" if use.is_forced else "auto"
    if use.is_named:
        choice = {"type": "function", "function": {"name": use.tools[0].name}}
    disabled = request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use
    return {"tools": offered.shown, "tool_choice": choice, "parallel_tool_calls": False if disabled else None}


def _thinking_fields(request: MessagesRequest, context: RequestContext) -> dict[str, Any]:
    """`adaptive` is what servers do anyway. OpenAI has no field for the rest; vLLM and others have these."""
    thinking = request.thinking
    if thinking is None:
        return {}
    check_thinking(thinking, context)
    budget = thinking_budget(thinking, request.max_tokens, context)
    is_said = thinking.type in ENABLED and thinking.type != "adaptive"
    kwargs = {"enable_thinking": ENABLED[thinking.type]} if is_said else None
    return {"chat_template_kwargs": kwargs, "thinking_token_budget": None if budget is None else budget.tokens}


def _format_fields(answer: OutputFormat | None) -> dict[str, Any]:
    if answer is None:
        return {}
    schema = {"name": "answer", "schema": answer.schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
