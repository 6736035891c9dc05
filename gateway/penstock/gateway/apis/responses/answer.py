"""The response object, while it is made and when it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.responses.items import new_id
from penstock.gateway.apis.responses.schemas import EFFORTS, VERBOSITIES, Reasoning, ResponsesRequest, TextOptions
from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.models.language.dataplane import Usage
from penstock.gateway.requests.record import RequestRecord

_RATE_LIMITED = 429
_FUNCTION = {"description": None, "parameters": None, "strict": None}
_SUMMARIES = ("auto", "concise", "detailed")


class ResponseObject:
    """Of one request: what it says of itself from the beginning."""

    def __init__(
        self,
        request: ResponsesRequest,
        usage: Usage,
        record: RequestRecord,
        *,
        temperature: float,
        top_p: float,
        store: bool,
        tier: str,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
    ) -> None:
        """`temperature` and `top_p` hold where the request is silent. `tier`: of `real_tier`."""
        self.id = new_id("resp")
        self.usage = usage
        """Goes on counting while the response is made."""
        reasoning = request.reasoning or Reasoning()
        text = request.text or TextOptions()
        self._fields = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "background": bool(request.background),
            "conversation": None if request.conversation_id is None else {"id": request.conversation_id},
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": request.model,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_retention": request.prompt_cache_retention,
            "reasoning": {
                "effort": _known(reasoning.effort, EFFORTS),
                "summary": _known(reasoning.summary or reasoning.generate_summary, _SUMMARIES),
            },
            "safety_identifier": request.safety_identifier,
            "service_tier": tier,
            "store": store,
            "temperature": temperature,
            "text": {
                "format": text.format or {"type": "text"},
                "verbosity": _known(text.verbosity, VERBOSITIES) or "medium",
            },
            "tool_choice": request.tool_choice or "auto",
            "tools": [_shown_tool(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": top_p if request.top_p is None else request.top_p,
            "truncation": request.truncation or "disabled",
            "user": request.user,
        }
        if record.ignored:
            self._fields["warnings"] = record.warnings

    def queued(self) -> dict[str, Any]:
        return self._with("queued", [])

    def begun(self) -> dict[str, Any]:
        return self._with("in_progress", [])

    def ended(self, output: Sequence[Mapping[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        usage = usage_object(self.usage)
        if finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._with("incomplete", output, incomplete_details=details, usage=usage)
        return self._with("completed", output, completed_at=int(time.time()), usage=usage)

    def failed(self, output: Sequence[Mapping[str, Any]], error: Exception) -> dict[str, Any]:
        return self._with("failed", output, error={"code": _code(error), "message": public_message(error)})

    def cancelled(self, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._with("cancelled", output)

    def _with(self, status: str, output: Sequence[Mapping[str, Any]], **changes: object) -> dict[str, Any]:
        nothing = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return self._fields | nothing | {"status": status, "output": output} | changes


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        return {**tool, "tools": [_shown_function(function) for function in tool["tools"]]}
    return _shown_function(tool)


def _shown_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """With null for what a function need not say, and Open Responses requires."""
    return {**(_FUNCTION if tool["type"] == "function" else {}), **tool}


def _known(word: str | None, words: Sequence[str]) -> str | None:
    """None for one that was ignored."""
    return word if word in words else None


def _code(error: Exception) -> str:
    """One of those that clients know."""
    if isinstance(error, InvalidRequestError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if wire_shape(error).status == _RATE_LIMITED else "server_error"


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
