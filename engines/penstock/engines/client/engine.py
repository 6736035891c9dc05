"""The seam that the gateway sees: requests in, token deltas out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.engine_view import EngineView
from penstock.engines.contract.messages import AddRequest
from penstock.engines.contract.model_info import ModelInfo


class Engine(Protocol):
    """A loaded model that generates. Lives on the gateway's event loop."""

    @property
    def info(self) -> ModelInfo:
        """Raises NotReadyError before the engine has ever been ready."""
        ...

    @property
    def ready(self) -> bool:
        """True while requests would be served now: loaded, alive, and stepping."""
        ...

    @property
    def failed(self) -> bool:
        """True when it is down and will not come back by itself."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest that the engine has sent."""
        ...

    async def start(self) -> None:
        """Loads the model; returns when it can serve. Raises EngineError when it cannot be loaded."""
        ...

    def new_ids(self, count: int) -> tuple[int, ...]:
        """Fresh ids for AddRequest.ids; never used again during the life of this engine object."""
        ...

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        """Hands requests (the prompts of one client call) to the engine; their outputs come through one stream.

        Raises NotReadyError at once when the engine is not there. Refusals by the scheduler (queue full, can never
        fit) come as the stream's terminal outputs.
        """
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Ends requests early; their blocks are free before the next step. Unknown ids are ignored. Their stream ends
        them with FinishReason.ABORT at once, without waiting for the engine."""
        ...

    async def load_adapter(self, key: str, folder: Path) -> None:
        """Loads a LoRA adapter (`AdapterHost`); after a restart of the engine it is there again.

        Raises UnsupportedError where the engine has no adapters, InvalidRequestError, OverloadedError, EngineError.
        """
        ...

    async def unload_adapter(self, key: str) -> None:
        """Frees it. No request may use it any more."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forgets all computed prompts; requests under way go on.

        Raises UnsupportedError, OverloadedError where the engine cannot while requests run, NotReadyError, EngineError.
        """
        ...

    async def inspect(self, since_steps: Sequence[int] = ()) -> list[EngineView | None]:
        """What each of its processes has at this moment, and its steps behind the number in `since_steps`, if there is
        one at its place; None for one that does not say. Costs nothing while it is not called.

        Raises UnsupportedError, NotReadyError, EngineError.
        """
        ...

    async def stop(self, reason: str = "The server was stopped.") -> None:
        """Ends what is still running with EngineDeadError and frees everything. `start` may be called again where the
        engine has a process of its own."""
        ...


@runtime_checkable
class Drainable(Protocol):
    """An engine that other servers may use, too."""

    async def drain(self) -> None:
        """They get no new requests in; returns when the engine works for none of them."""
        ...
