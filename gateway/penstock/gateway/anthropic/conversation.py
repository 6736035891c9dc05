"""System prompt and messages as chat templates know them, which is OpenAI's form."""

from __future__ import annotations

from typing import Any

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.anthropic.blocks import checked_blocks, field, texts
from penstock.gateway.anthropic.schemas import Block, Message

_ROLES = ("user", "assistant", "system")
_BILLING = "x-anthropic-billing-header"
"""Claude Code opens its system prompt with a block of this name that differs from request to request. It says nothing
to a model, and no cached prefix would ever fit."""


def template_messages(system: str | list[Block] | None, messages: list[Message]) -> list[dict[str, Any]]:
    """Raises InvalidRequestError for what makes no conversation, UnsupportedError for blocks that are not taken."""
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    turns = [[message] for message in _system_messages(system)]
    calls: set[str] = set()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role not in _ROLES:
            raise InvalidRequestError(f"{where}.role must be user, assistant or system.", param=f"{where}.role")
        for each in _translated(message, f"{where}.content", calls):
            _add(turns, each)
    return [_joined(turn) for turn in turns]


def continues(messages: list[dict[str, Any]]) -> bool:
    """Whether the answer goes on with the last message, which is the assistant's then. Raises InvalidRequestError where
    that one cannot be continued."""
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        raise InvalidRequestError("messages: the last tool_use needs a tool_result.", param="messages")
    if not last["content"]:
        raise InvalidRequestError("messages: the last one has no text to continue.", param="messages")
    return True


def _system_messages(system: str | list[Block] | None) -> list[dict[str, Any]]:
    given = texts(checked_blocks(system or "", "system", "system"))
    text = "\n".join([each for each in given if not each.startswith(_BILLING)])
    return [{"role": "system", "content": text}] if text else []


def _translated(message: Message, where: str, calls: set[str]) -> list[dict[str, Any]]:
    """`calls` has the ids of all calls so far."""
    blocks = checked_blocks(message.content, message.role, where)
    if message.role == "assistant":
        return [_assistant(blocks, calls)]
    if not blocks:
        raise InvalidRequestError(f"{where} must not be empty.", param=where)
    found = [_tool_answer(block, place, calls) for block, place in blocks if block.type == "tool_result"]
    given = texts(blocks)
    return [*found, {"role": message.role, "content": "\n".join(given)}] if given else found


def _assistant(blocks: list[tuple[Block, str]], calls: set[str]) -> dict[str, Any]:
    """What a model has written in pieces is put together without anything between them."""
    result: dict[str, Any] = {"role": "assistant", "content": "".join(texts(blocks))}
    thoughts = [field(block, "thinking", place) for block, place in blocks if block.type == "thinking"]
    if thoughts:
        result["reasoning_content"] = "".join(thoughts)
    called = [_call(block, place) for block, place in blocks if block.type == "tool_use"]
    if called:
        calls.update(call["id"] for call in called)
        result["tool_calls"] = called
    return result


def _call(block: Block, where: str) -> dict[str, Any]:
    function = {"name": field(block, "name", where), "arguments": field(block, "input", where)}
    return {"id": field(block, "id", where), "type": "function", "function": function}


def _tool_answer(block: Block, where: str, calls: set[str]) -> dict[str, Any]:
    call = field(block, "tool_use_id", where)
    if call not in calls:
        param = f"{where}.tool_use_id"
        raise InvalidRequestError(f"{param} names no tool_use of an earlier assistant message.", param=param)
    text = "\n".join(texts(checked_blocks(block.content or "", "system", f"{where}.content")))
    return {"role": "tool", "tool_call_id": call, "content": text}


def _add(turns: list[list[dict[str, Any]]], message: dict[str, Any]) -> None:
    """Messages of the same side that follow each other are one turn: many templates want the sides to alternate."""
    role = message["role"]
    if role in ("user", "assistant") and turns and turns[-1][0]["role"] == role:
        turns[-1].append(message)
    else:
        turns.append([message])


def _joined(turn: list[dict[str, Any]]) -> dict[str, Any]:
    """One message. All are joined at once: a body can hold very many, and each `+` would copy all before it."""
    if len(turn) == 1:
        return turn[0]
    role = turn[0]["role"]
    joined: dict[str, Any] = {"role": role}
    joined["content"] = ("\n" if role == "user" else "").join([message["content"] for message in turn])
    thoughts = [message["reasoning_content"] for message in turn if "reasoning_content" in message]
    if thoughts:
        joined["reasoning_content"] = "".join(thoughts)
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined
