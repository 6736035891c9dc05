"""Things that a waiting request waits for other than room in a step, and the work beside the steps that brings them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from penstock.engines.contract.engine_view import WaitsFor
from penstock.engines.contract.messages import AddRequest, CallReply, Grammar, ImageInput
from penstock.engines.contract.step import EmbeddingSpan, ImageRows, PlacedTile
from penstock.engines.errors import PenstockError
from penstock.kvcache import Attachment


class Pending(Protocol):
    """An adapter that is being read, a grammar that is being compiled, an image that is being encoded, blocks that are
    being fetched, a prompt that another request computes: one object for all requests that wait for the same. Others
    overtake them meanwhile."""

    @property
    def reason(self) -> str:
        """A value of `WaitsFor`, for operators."""
        ...

    @property
    def is_pending(self) -> bool:
        """It is neither there nor given up. Never true again once it was false."""
        ...

    @property
    def error(self) -> PenstockError | None:
        """Ends the requests that wait for it; None: they go on, with it or without."""
        ...


NeedsOf = Callable[[AddRequest], Sequence[Pending]]
"""What a request is known to wait for at its arrival. Called for a request that is not refused: the work may begin
then."""


def no_needs(message: AddRequest) -> Sequence[Pending]:
    """A NeedsOf where nothing works beside the steps."""
    return ()


class HasId(Protocol):
    @property
    def id(self) -> int: ...


R = TypeVar("R", bound=HasId)


class PassedBy(dict[int, Pending], Generic[R]):
    """Waiting requests that others may overtake: what each waits for, by its id. Each such thing is looked at once in a
    step, however many wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[Pending, dict[int, R]] = {}

    @property
    def requests(self) -> Iterator[R]:
        return chain.from_iterable(requests.values() for requests in self._groups.values())

    def add(self, request: R, pending: Pending) -> None:
        self._groups.setdefault(pending, {})[request.id] = request
        self[request.id] = pending

    def remove(self, request: R) -> bool:
        """False: it is not among them."""
        pending = self.pop(request.id, None)
        if pending is None:
            return False
        requests = self._groups[pending]
        del requests[request.id]
        if not requests:
            del self._groups[pending]
        return True

    @property
    def has_unblocked(self) -> bool:
        """Whether some of them wait for nothing any more."""
        return not all(pending.is_pending for pending in self._groups)

    def take_unblocked(self) -> list[R]:
        """Takes those out that wait for nothing any more."""
        over = [pending for pending in self._groups if not pending.is_pending]
        unblocked = [request for pending in over for request in self._groups.pop(pending).values()]
        for request in unblocked:
            del self[request.id]
        return unblocked


class SideWork(Protocol):
    """Work beside the steps, on threads of its own. Owned by the engine's loop, which calls `advance` between steps
    while something is under way."""

    @property
    def under_way(self) -> Collection[object]:
        """What is not at its end; `advance` has nothing to do while this is empty."""
        ...

    @property
    def wakeups(self) -> Sequence[int]:
        """File descriptors that are readable while `advance` has something to take in."""
        ...

    @property
    def next_look(self) -> float | None:
        """Latest time of the next call of `advance`."""
        ...

    def advance(self) -> Sequence[CallReply]:
        """Takes in what is done, gives up what takes too long, and begins what is next. Returns the replies to
        commands that are due."""
        ...


@dataclass(eq=False, slots=True)
class Compilation:
    """A grammar on its way from its text to what a runner can follow (`Pending`). Shared by all requests with an equal
    grammar. It gets a result or an error, once."""

    reason: ClassVar[str] = WaitsFor.GRAMMAR
    grammar: Grammar
    give_up_at: float
    """In the engine's time: it gets an error then."""
    compiled: Any = None
    """What the runner made of it (`NewRequest.grammar`)."""
    error: PenstockError | None = None

    @property
    def is_pending(self) -> bool:
        return self.compiled is None and self.error is None


@dataclass(eq=False, slots=True)
class ImageEncoding:
    """An image on its way from its pixels to what the model reads in its place (`Pending`). Shared by all requests of a
    tenant with the same image. It gets rows or an error, once, or neither if all of them end before."""

    reason: ClassVar[str] = WaitsFor.IMAGE
    rows: ImageRows | None = None
    error: PenstockError | None = None

    @property
    def is_pending(self) -> bool:
        return self.rows is None and self.error is None


class PlacedImages:
    """The images of one prompt: where they stand, and what they are encoded to."""

    __slots__ = ("_encodings", "_images", "tiles")

    def __init__(self, images: Sequence[ImageInput], encodings: Sequence[ImageEncoding]) -> None:
        """Keeps none of the pixels."""
        self._images = [(image.key, image.spans) for image in images]
        self.tiles = [
            PlacedTile(start, height, width)
            for image in images
            for (start, _), (height, width) in zip(image.spans, image.tiles, strict=False)
        ]
        """Only where each has one span (`ModelInfo.has_grid_positions`)."""
        self._encodings = encodings

    @property
    def attachments(self) -> list[Attachment]:
        """What the hashes of the prompt's blocks have of them."""
        placed = []
        for key, spans in self._images:
            offset = 0
            for start, count in spans:
                placed.append(Attachment(start, count, key, offset))
                offset += count
        return placed

    @property
    def embeddings(self) -> list[EmbeddingSpan]:
        """Once all are encoded."""
        placed = []
        for (_, spans), encoding in zip(self._images, self._encodings, strict=True):
            offset = 0
            assert encoding.rows is not None
            for start, count in spans:
                placed.append(EmbeddingSpan(start, encoding.rows[offset : offset + count]))
                offset += count
        return placed
