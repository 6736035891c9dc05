"""Requests as requests of the chat front, which checks them: all but their input."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.apis.openai.schemas import ChatRequest
from penstock.gateway.apis.responses.schemas import (
    EFFORTS,
    LOGPROBS,
    VERBOSITIES,
    Include,
    Reasoning,
    ResponsesRequest,
    TextOptions,
)
from penstock.gateway.apis.responses.tools import ResponseTools
from penstock.gateway.models.language.sampling import SamplingFields
from penstock.gateway.models.language.structured_output import JsonSchema, ResponseFormat
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import RequestRecord

_SAMPLING = tuple(field for field in SamplingFields.__struct_fields__ if field not in ("max_tokens", "response_format"))


def chat_request(
    request: ResponsesRequest, tools: ResponseTools, include: Include, context: RequestContext
) -> ChatRequest:
    """Still without messages. `context` notes hints that are not followed. Raises InvalidRequestError."""
    if request.top_logprobs and not include.logprobs:
        raise InvalidRequestError(f"top_logprobs needs {LOGPROBS} in include.", param="top_logprobs")
    if request.context_management:
        context.ignore("context_management", "conversations are not made shorter.")
    text = request.text or TextOptions()
    return ChatRequest(
        model=request.model,
        messages=[],
        max_completion_tokens=request.max_output_tokens,
        tools=tools.functions,
        tool_choice=tools.choice,
        parallel_tool_calls=False if tools.most_calls == 1 else request.parallel_tool_calls,
        reasoning_effort=_effort(request.reasoning, context),
        response_format=_response_format(text),
        logprobs=include.logprobs,
        top_logprobs=request.top_logprobs,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        service_tier=request.service_tier,
        verbosity=_known(text.verbosity, VERBOSITIES, "text.verbosity", context),
        metadata=request.metadata,
        priority=request.priority,
        cache_salt=request.cache_salt,
        chat_template_kwargs=request.chat_template_kwargs,
        thinking_token_budget=request.thinking_token_budget,
        max_reasoning_tokens=request.max_reasoning_tokens,
        **{name: getattr(request, name) for name in _SAMPLING},
    )


def _effort(reasoning: Reasoning | None, context: RequestContext) -> Any:
    if reasoning is None:
        return None
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):
            context.ignore(f"reasoning.{name}", "reasoning is shown as it is, and not summarized.")
    return _known(reasoning.effort, EFFORTS, "reasoning.effort", context)


def _known(word: str | None, words: Sequence[str], field: str, context: RequestContext) -> Any:
    """None for a hint that this server does not know."""
    if word is None or word in words:
        return word
    context.ignore(field, f"it is not one of {', '.join(words)}.")
    return None


def _response_format(text: TextOptions) -> ResponseFormat | None:
    form = text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat(type="json_object")
    if form.type != "json_schema":
        message = "text.format.type must be text, json_object or json_schema."
        raise InvalidRequestError(message, param="text.format.type")
    for name in ("name", "schema"):
        if getattr(form, name) is None:
            raise InvalidRequestError(f"text.format.{name} is missing.", param=f"text.format.{name}")
    schema = JsonSchema(name=form.name, description=form.description, schema=form.schema, strict=form.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
}
_CHAT_NAME = re.compile(rf"\b({'|'.join(sorted(_NAMES, reverse=True))})\b|(?<=\])\.function\b")
"""The fields, and what a tool's own fields are in there: `tools[0].function.name`."""
_TOOL = re.compile(r"\btools\[[0-9]+\]")


@contextmanager
def in_words_of_responses(record: RequestRecord, places: Sequence[str] = ()) -> Iterator[None]:
    """Raises what is raised inside, and renames what is noted as ignored there. `places`: of each of the chat's tools,
    where it stands in the request."""

    names = {f"tools[{number}]": place for number, place in enumerate(places)}

    def renamed(text: str) -> str:
        return _TOOL.sub(lambda match: names.get(match[0], match[0]), _renamed(text))

    before = len(record.ignored)
    try:
        yield
        if len(record.ignored) > before:
            record.ignored = (*record.ignored[:before], *map(_renamed, record.ignored[before:]))
    except PenstockError as error:
        if error.param is not None and error.param != renamed(error.param):
            error.message, error.param = renamed(error.message), renamed(error.param)
        raise


def name_of_responses(field: str | None) -> str | None:
    """A chat's field as it is called here."""
    return None if field is None else _renamed(field)


def _renamed(text: str) -> str:
    return _CHAT_NAME.sub(lambda match: _NAMES.get(match[0], ""), text)
