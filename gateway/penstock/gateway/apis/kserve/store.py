"""The store of models, as the KServe fronts see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.engines.errors import NotReadyError
from penstock.gateway.requests.context import Principal, RequestContext, Role

ModelState = Literal["READY", "UNAVAILABLE", "LOADING", "UNLOADING"]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index. A model that is in the repository and was never loaded has only its name."""

    name: str
    version: str = ""
    state: ModelState | None = None
    reason: str = ""
    public_reason: str | None = None
    """For callers who may not administer, where `reason` has contents of files or paths of this machine."""

    def reason_for(self, principal: Principal) -> str:
        if self.public_reason is None or Role.ADMIN in principal.roles:
            return self.reason
        return self.public_reason


class NotExplicitError(NotReadyError):
    """Models are not loaded and unloaded by request on this server. With Triton's text, in control mode none too."""

    def __init__(self) -> None:
        super().__init__("explicit model load / unload is not allowed if polling is enabled")


class ServedByModels(ABC):
    """An InferModel under a name that other models serve."""

    @abstractmethod
    def serving_models(self) -> list[InferModel]:
        """Those of them that are there."""


class ModelNames(Protocol):
    """Whose a name is that a request for tensors has: the catalogue (`models/catalogue.py`), which says of each
    function what it does."""

    @property
    def loads(self) -> bool: ...

    async def admit(self, name: str, version: str, context: RequestContext, *, loads: bool = True) -> None: ...

    async def offers(self, name: str, context: RequestContext) -> bool: ...

    def would_load(self, name: str) -> bool: ...


class ModelStore(Protocol):
    """Models by name and version. Lives on the event loop."""

    def model(self, name: str, version: str = "", request: InferRequest | None = None) -> InferModel:
        """The model in this version, "" for the newest that is ready. `request`: what it is going to get; a name that
        several models serve leads to one of them then.

        Raises ModelNotFoundError with Triton's texts: `Request for unknown model: 'x' is not found`, `... 'x' version
        9 is not found`, `... 'x' has no available versions`; InvalidRequestError for a version that is no number.
        """
        ...

    def versions(self, name: str) -> list[int]:
        """The versions that are ready, ascending; empty for an unknown model."""
        ...

    def models(self) -> Iterable[InferModel]:
        """All that are loaded, by name and version."""
        ...

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """Everything in the repositories and everything that was ever loaded; `ready`: only what is ready."""
        ...

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Loads or reloads; returns when the model is ready. A loaded model keeps serving until then, and stays when
        loading fails. `config` is a ModelConfig in JSON; `files`, by their path in the model's folder, need a
        config.

        Raises NotExplicitError, InvalidRequestError, EngineError.
        """
        ...

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Returns when new requests are refused; what runs, runs on. Unknown names are ignored, as in Triton."""
        ...

    @property
    def ready(self) -> bool:
        """True when the server may say that it is ready: with strict readiness, all models that should be are."""
        ...
