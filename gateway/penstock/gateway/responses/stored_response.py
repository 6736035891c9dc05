"""A response that was kept, and those that it goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.gateway.responses.schemas import InputItem


class _Answer(msgspec.Struct):
    output: list[InputItem]


def output_of(response: bytes) -> list[InputItem]:
    """The output of a response, which is JSON."""
    return msgspec.json.decode(response, type=_Answer).output


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """As it was when it was asked for, whatever is deleted meanwhile."""

    id: str
    links: Sequence[tuple[bytes, bytes]]
    """JSON of the input items and of the response object: of all responses up to this one, the first one first."""
    size: int
    """Bytes that they count together."""

    @property
    def response(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.links[-1][1])
        return found

    def conversation(self) -> list[InputItem]:
        """All items up to this response, the first ones first."""
        given, answers = msgspec.json.Decoder(list[InputItem]), msgspec.json.Decoder(_Answer)
        return [
            item
            for items, response in self.links
            for some in (given.decode(items), answers.decode(response).output)
            for item in some
        ]

    def shown_conversation(self) -> list[dict[str, Any]]:
        """The same as it is shown."""
        return self.input_items() + list(self.response["output"])

    def input_items(self) -> list[dict[str, Any]]:
        """Those of the conversation before the response's output, as they are shown."""
        *earlier, (own, _) = self.links
        found: list[dict[str, Any]] = []
        for items, response in earlier:
            found += msgspec.json.decode(items) + msgspec.json.decode(response)["output"]
        return found + list(msgspec.json.decode(own))
