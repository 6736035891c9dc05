"""Responses that are kept for a while, in the memory of this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engines.errors import NotFoundError
from penstock.gateway.responses.schemas import InputItem

_encode = msgspec.json.Encoder().encode
_OVERHEAD = 2048
"""Bytes that a response takes beside its JSON, about."""


class _Answer(msgspec.Struct):
    output: list[InputItem]


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    tenant: str
    """Whose it is. Nobody else is told that there is such a response."""
    response: bytes
    """JSON of the response object."""
    input: bytes
    """JSON of the request's own input items."""
    previous: StoredResponse | None
    size: int
    """Bytes, those of all responses before it included: they stay for as long as this one does."""

    def conversation(self) -> list[InputItem]:
        """All items up to this response, the first ones first."""
        given, answers = msgspec.json.Decoder(list[InputItem]), msgspec.json.Decoder(_Answer)
        return [
            item
            for each in self._chain()
            for items in (given.decode(each.input), answers.decode(each.response).output)
            for item in items
        ]

    def input_items(self) -> list[dict[str, Any]]:
        """Those of the conversation before the response's output, as they are shown."""
        found: list[dict[str, Any]] = []
        for each in self._chain():
            found += msgspec.json.decode(each.input)
            if each is not self:
                found += msgspec.json.decode(each.response)["output"]
        return found

    def _chain(self) -> list[StoredResponse]:
        """The first response of the conversation, and all up to this one."""
        found: list[StoredResponse] = []
        each: StoredResponse | None = self
        while each is not None:
            found.append(each)
            each = each.previous
        return found[::-1]


class ResponseStore:
    """At most so many, and of so many bytes; the one that was not used for longest goes first."""

    def __init__(self, most: int, most_bytes: int, most_bytes_each: int) -> None:
        """`most` 0: nothing is kept. `most_bytes_each` bounds how long it takes to read a conversation again."""
        self._most = most
        self._most_bytes = most_bytes
        self._most_bytes_each = min(most_bytes, most_bytes_each)
        self._found: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def enabled(self) -> bool:
        return self._most > 0

    @property
    def size(self) -> int:
        """Bytes; what several responses share counts for each of them."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._found)

    def keep(
        self,
        tenant: str,
        response: Mapping[str, Any],
        items: Sequence[Mapping[str, Any]],
        previous: StoredResponse | None,
    ) -> None:
        """One that is too large is not kept. `items` are those of the input."""
        body, given = _encode(response), _encode(items)
        size = len(body) + len(given) + _OVERHEAD + (0 if previous is None else previous.size)
        if size > self._most_bytes_each:
            return
        self._found[response["id"]] = StoredResponse(tenant, body, given, previous, size)
        self._bytes += size
        while len(self._found) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._found.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, response_id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """Raises NotFoundError; `param` is the caller's field."""
        found = self._found.get(response_id)
        if found is None or found.tenant != tenant:
            raise NotFoundError("There is no response with this id.", param=param)
        self._found.move_to_end(response_id)
        return found

    def delete(self, response_id: str, tenant: str) -> None:
        """What has gone on from it keeps what it needs. Raises NotFoundError."""
        self._bytes -= self.get(response_id, tenant).size
        del self._found[response_id]
