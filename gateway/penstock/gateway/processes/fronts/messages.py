"""The messages between supervisor and fronts."""

from __future__ import annotations

import msgspec

from penstock.engines.door.spec import DoorAddress
from penstock.gateway.apis.usage.ledger import RequestUsage
from penstock.gateway.configuration.config import Config
from penstock.gateway.models.language.models import TextSettings
from penstock.gateway.processes.fronts.counts import Counts, Samples
from penstock.gateway.processes.fronts.passing import FromAnswering, FromPassing
from penstock.gateway.processes.model_host.messages import DownMessage, UpMessage
from penstock.gateway.requests.context import Role
from penstock.gateway.requests.request_watch import RequestChoice, WatchedRequests


class _Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    pass


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Of `models.language.adapters.Adapter`."""

    name: str
    key: str
    folder: str
    created: int


class TensorName(msgspec.Struct, frozen=True, kw_only=True):
    """A KServe model that the language model is, in the form of vLLM's backend."""

    name: str
    version: int
    config: bytes
    """A ModelConfig as protobuf."""
    policy: str


class FrontModel(msgspec.Struct, frozen=True, kw_only=True):
    """Of `models.language.models.LoadedModel`: all that a front needs to serve it."""

    id: int
    """Of the loaded model: loaded again, it is another one."""
    names: tuple[str, ...]
    root: str
    created: int
    texts: TextSettings
    engine: DoorAddress
    max_num_seqs: int
    salt_key: bytes | None
    adapters: tuple[AdapterEntry, ...]
    most_adapters: int
    tensors: tuple[TensorName, ...]


class GrantedKey(msgspec.Struct, frozen=True, kw_only=True):
    """Of a Principal, by the digest of its key."""

    digest: bytes
    key: str
    tenant: str
    roles: tuple[Role, ...]
    models: tuple[str, ...] | None
    priority: int
    limited: bool
    """What it may use is counted by the supervisor."""


# From the supervisor


class Begin(_Message, frozen=True, kw_only=True):
    """The first message."""

    number: int
    """Of the front."""
    config: Config
    fronts: int
    salt_key: bytes
    folder: str
    """Where the doors of engines are."""
    first_trace: int
    """The number of its first trace: no other front's are near."""
    listens: tuple[str, ...]
    """Which ports the inherited sockets are of, in their order: http, grpc."""


class Table(_Message, frozen=True, kw_only=True):
    """All language models that fronts serve from now on."""

    revision: int
    """Higher than of the table before."""
    models: tuple[FrontModel, ...]
    routed: tuple[str, ...]
    """Names that traffic rules choose a model for: the supervisor answers for them."""


class Keys(_Message, frozen=True, kw_only=True):
    """None: no keys are asked for."""

    keys: tuple[GrantedKey, ...] | None


class Granted(_Message, frozen=True, kw_only=True):
    """To `Ask`."""

    id: int
    refusal: str | None
    """None: the request may begin, and is ended by `Ended`."""
    retry_after: float
    headers: list[tuple[bytes, bytes]]


class ReadAgain(_Message, frozen=True, kw_only=True):
    """SIGHUP has come: the certificates are read again."""


class Logs(_Message, frozen=True, kw_only=True):
    """Settings of the log as the logging extension has them."""

    settings: dict[str, bool | int | str]


class Report(_Message, frozen=True, kw_only=True):
    """Asks for `Reported`."""

    id: int


class WatchRequests(_Message, frozen=True, kw_only=True):
    """Asks for `RequestsWatched`."""

    id: int
    choice: RequestChoice


class CancelRequest(_Message, frozen=True, kw_only=True):
    """Asks for `Cancelled`."""

    id: int
    request: str


class Leave(_Message, frozen=True, kw_only=True):
    """Clients are asked to go elsewhere; what comes is served."""


class Drain(_Message, frozen=True, kw_only=True):
    """No new requests; to be answered by `Idle`."""


class Expire(_Message, frozen=True, kw_only=True):
    """Those that still run end now."""


class Stop(_Message, frozen=True, kw_only=True):
    """The front closes its ports and ends."""


FromSupervisor = (
    Begin
    | Table
    | Keys
    | Granted
    | ReadAgain
    | Logs
    | Report
    | WatchRequests
    | CancelRequest
    | Leave
    | Drain
    | Expire
    | Stop
)

# From a front


class Serving(_Message, frozen=True, kw_only=True):
    """The ports are open."""


class Failed(_Message, frozen=True, kw_only=True):
    """The front cannot start, or cannot go on."""

    reason: str


class Holds(_Message, frozen=True, kw_only=True):
    """Which models and adapters requests of this front may still use."""

    revision: int
    """Of the newest table that this front has."""
    models: tuple[int, ...]
    adapters: tuple[str, ...]
    """Keys."""


class Ask(_Message, frozen=True, kw_only=True):
    """Whether a request of this key may begin."""

    id: int
    """Of the request, from now to its end."""
    digest: bytes
    """Of the key."""


class Spent(_Message, frozen=True, kw_only=True):
    """Tokens that a request has used; a negative count is given back."""

    id: int
    """Of its `Ask`."""
    tokens: int


class Ended(_Message, frozen=True, kw_only=True):
    """A request that had begun."""

    id: int
    """Of its `Ask`."""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a KServe model."""

    id: int
    """Of the language model."""
    name: str
    version: int
    counts: Counts
    """Since the last report."""
    pending: int


class Reported(_Message, frozen=True, kw_only=True):
    id: int
    samples: list[Samples]
    statistics: list[ModelReport]


class RequestsWatched(_Message, frozen=True, kw_only=True):
    id: int
    requests: WatchedRequests


class Cancelled(_Message, frozen=True, kw_only=True):
    id: int
    done: bool
    """False: the front has no such request."""


class Idle(_Message, frozen=True, kw_only=True):
    """Nothing is in flight, and nothing begins any more."""


class Counted(_Message, frozen=True, kw_only=True):
    """A request has ended, and has used this."""

    usage: RequestUsage


Answer = Reported | RequestsWatched | Cancelled
"""To what the supervisor asks."""
FromFront = Serving | Failed | Holds | Ask | Spent | Ended | Counted | Answer | Idle

# On one connection: what these tell each other, what a front and the models of the supervisor do, and requests that are
# passed on.
decode_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor | DownMessage | FromAnswering).decode
decode_from_front = msgspec.msgpack.Decoder(FromFront | UpMessage | FromPassing).decode
