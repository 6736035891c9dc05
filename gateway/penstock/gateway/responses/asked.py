"""A request, what it goes on from, and what is done with its response when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, NotFoundError
from penstock.gateway.errors import PreviousResponseError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.responses.include import NOTHING, Include
from penstock.gateway.responses.items import id_in_message, input_items, shown_item
from penstock.gateway.responses.schemas import InputItem, ResponsesRequest
from penstock.gateway.responses.service import ResponseService
from penstock.gateway.responses.stored_response import StoredResponse
from penstock.gateway.responses.tools import NO_TOOLS, ResponseTools, response_tools

_encode = msgspec.json.Encoder().encode
_TOO_LARGE = "The response is too large to be kept."


@dataclass
class Asked:
    request: ResponsesRequest
    stream: bool | None
    items: list[InputItem] = field(default_factory=list)
    previous: StoredResponse | None = None
    include: Include = NOTHING
    tools: ResponseTools = NO_TOOLS

    @cached_property
    def shown_items(self) -> list[dict[str, Any]]:
        """With ids."""
        return [shown_item(item) for item in self.items]

    @cached_property
    def items_json(self) -> bytes:
        return _encode(self.shown_items)

    def leave_out_logprobs(self, context: RequestContext, reason: str) -> None:
        """The answer comes without, and `context` notes it."""
        context.ignore("include", reason)
        self.include = replace(self.include, logprobs=False)
        self.request = msgspec.structs.replace(self.request, top_logprobs=None)

    async def earlier(self, responses: ResponseService, context: RequestContext) -> list[InputItem]:
        """Reads the request, and gives the items that it goes on from. Raises InvalidRequestError."""
        request, tenant = self.request, context.tenant
        self.include = Include.parse(request.include, context)
        self.tools = response_tools(request, context)
        self.items = await responses.looked_up(input_items(request.input, context), tenant)
        if request.conversation_id is not None:
            more = len(self.items_json)
            return await responses.conversations.earlier_items(request.conversation_id, tenant, more)
        if request.previous_response_id is None:
            return []
        name = "previous_response_id"
        try:
            self.previous = await responses.store.get(request.previous_response_id, tenant, name)
        except NotFoundError:
            message = f"Previous response with id '{id_in_message(request.previous_response_id)}' not found."
            raise PreviousResponseError(message, param=name) from None
        if self.previous.response.get("conversation") is not None:
            raise InvalidRequestError(f"{name}: it is part of a conversation: name that instead.", param=name)
        return self.previous.conversation()


class Keeping:
    """Of one response."""

    def __init__(self, responses: ResponseService, asked: Asked, tenant: str) -> None:
        self._responses = responses
        self._asked = asked
        self._tenant = tenant

    def keep(self, ended: dict[str, Any]) -> None:
        """Notes in the response when it is too large."""
        if ended["store"]:
            body = _encode(ended)
            ended["store"] = self.fits(body)
            if ended["store"]:
                asked = self._asked
                self._responses.store.keep(self._tenant, ended["id"], body, asked.items_json, asked.previous)
        self._go_on(ended)

    def fits(self, body: bytes) -> bool:
        """Whether a response with this JSON is small enough to be kept."""
        return self._responses.store.fits(len(body) + len(self._asked.items_json), self._asked.previous)

    def end(self, ended: dict[str, Any]) -> None:
        """For one in the background, which is kept since it was queued. One that is too large has failed."""
        body = _encode(ended)
        if not self.fits(body):
            error = {"code": "server_error", "message": _TOO_LARGE}
            ended.update(status="failed", output=[], error=error, incomplete_details=None, completed_at=None)
            body = _encode(ended)
        self._responses.store.end(self._tenant, ended["id"], body)
        self._go_on(ended)

    def _go_on(self, ended: Mapping[str, Any]) -> None:
        """The conversation, if there is one."""
        conversation_id = self._asked.request.conversation_id
        if conversation_id is not None and ended["status"] in ("completed", "incomplete"):
            output = [item for item in ended["output"] if not _is_half_a_call(item)]
            items = self._asked.shown_items + output
            self._responses.conversations.append(conversation_id, self._tenant, items)


def _is_half_a_call(item: Mapping[str, Any]) -> bool:
    """Nobody can answer that."""
    return item["type"] in ("function_call", "custom_tool_call") and item["status"] == "incomplete"
