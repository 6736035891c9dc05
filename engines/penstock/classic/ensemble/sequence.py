"""Which sequence the steps of an ensemble's request belong to: the caller's, until a response says otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.classic.messages import InferRequest, Parameter
from penstock.engines.errors import EngineError

logger = logging.getLogger(__name__)

_ID, _START, _END = "sequence_id", "sequence_start", "sequence_end"


class SequencePlace(NamedTuple):
    """What a request says of its sequence."""

    id: int | str
    """0 or "" for none."""
    start: bool
    end: bool

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Of a response, in Triton's names."""
        return {_ID: self.id, _START: self.start, _END: self.end}


def place_of(request: InferRequest) -> SequencePlace:
    return SequencePlace(request.correlation_id, request.sequence_start, request.sequence_end)


def told_by(model: str, asked: InferRequest, parameters: Mapping[str, Parameter]) -> SequencePlace | None:
    """What a response's parameters say, which holds for all that is made of it; None where they say nothing. Raises
    EngineError for values of the wrong type."""
    if not (_ID in parameters or _START in parameters or _END in parameters):
        return None
    before = place_of(asked)
    found = parameters.get(_ID, before.id)
    flags = parameters.get(_START, before.start), parameters.get(_END, before.end)
    if isinstance(found, bool) or not isinstance(found, int | str) or not all(isinstance(flag, bool) for flag in flags):
        raise EngineError(
            f"model '{model}' says of its response's sequence what cannot be: {_ID} must be an integer or a text,"
            f" {_START} and {_END} must be true or false"
        )
    return SequencePlace(found, bool(flags[0]), bool(flags[1]))


def first_of(places: Iterable[SequencePlace | None], usual: SequencePlace, of_what: str) -> SequencePlace:
    """As in Triton, of several different ones the first holds, and the log says so."""
    found: SequencePlace | None = None
    for place in places:
        if place is None or place == found:
            continue
        if found is None:
            found = place
        else:
            logger.error("%s has inputs of different sequences, %s and %s: the first holds", of_what, found, place)
    return usual if found is None else found
