"""Clients of a door: which requests are whose, what these must be like, and what each client may still be sent. Plain
data, no sockets. An engine trusts its owner; a client of a door is a gateway, too, but not the one that started it.

The engine knows requests by ids that carry their client's number in the upper bits; a client counts its own from 1.
Numbers are never used twice in the life of an engine process, so what comes late for a client that has gone reaches
nobody. The owner's requests have number 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    RequestOutput,
    ResetPrefixCache,
    SamplingParams,
    StepRecord,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.spec import DoorSpec
from penstock.engines.errors import InvalidRequestError, NotFoundError, OverloadedError, UnsupportedError

NUMBER_SHIFT = 40
_LOCAL = (1 << NUMBER_SHIFT) - 1
_RETRY_AFTER = 5.0
_OLDEST_ARRIVAL = 3600.0
"""Seconds before now that a request may say it has arrived: queues order by it."""


def number_of(engine_id: int) -> int:
    """Of the client whose request, or call, the engine knows by this id; 0: the owner's."""
    return engine_id >> NUMBER_SHIFT


@dataclass(eq=False, slots=True)
class Client:
    number: int
    peer: bytes
    """The connection. A client that connects again is another one."""
    name: str
    wants_steps: bool
    heard_at: float
    live: set[int] = field(default_factory=set)
    """Engine ids without a terminal output so far."""
    admitted: int = 0
    """Samples that the engine has taken in."""
    untaken_bytes: int = 0
    """Of messages that the engine has not taken in yet."""
    sent_bytes: int = 0
    read_bytes: int = 0
    """As it says."""
    told_at: float = -math.inf
    """When it was last sent outputs or stats."""
    steps: list[StepRecord] = field(default_factory=list)
    """That it has not been told of."""

    def engine_id(self, local: int) -> int:
        """Raises InvalidRequestError for a number that no client counts to."""
        if not 0 < local <= _LOCAL:
            raise InvalidRequestError(f"{local} is no id of a request")
        return self.number << NUMBER_SHIFT | local

    def add(self, request: AddRequest, now: float) -> AddRequest:
        """As the engine takes it. Raises InvalidRequestError, with nothing noted."""
        ids = tuple(map(self.engine_id, request.ids))
        if not ids or len(set(ids)) < len(ids) or not self.live.isdisjoint(ids):
            raise InvalidRequestError("ids of a request must be new")
        age, left = request.arrival_time, request.deadline
        if not -_OLDEST_ARRIVAL <= age <= 0:
            age = -_OLDEST_ARRIVAL if age < 0 else 0.0  # also what is no number
        if left is not None and left != left:
            raise InvalidRequestError("a deadline must be a number of seconds")
        self.live.update(ids)
        return msgspec.structs.replace(
            request, ids=ids, arrival_time=now + age, deadline=None if left is None else now + left
        )

    def abort(self, message: AbortRequests) -> AbortRequests:
        """They stay live until the engine has said that they ended."""
        return AbortRequests([self.engine_id(local) for local in message.ids])

    def call(self, message: ResetPrefixCache) -> ResetPrefixCache:
        return ResetPrefixCache(self.engine_id(message.call))

    def outputs(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """The same objects, with the client's ids. What is not live any more is left out."""
        live, own = self.live, []
        for output in outputs:
            if output.id in live:
                if output.finish_reason is not None:
                    live.discard(output.id)
                output.id &= _LOCAL
                own.append(output)
        return own

    def replies(self, replies: Sequence[CallReply]) -> list[CallReply]:
        return [CallReply(reply.call & _LOCAL, reply.error) for reply in replies]


class ClientTable:
    def __init__(self, spec: DoorSpec) -> None:
        self._spec = spec
        self._by_peer: dict[bytes, Client] = {}
        self._by_number: dict[int, Client] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._by_peer)

    def __iter__(self) -> Iterator[Client]:
        """Of this moment: clients may leave meanwhile."""
        return iter(tuple(self._by_peer.values()))

    def of(self, peer: bytes) -> Client | None:
        return self._by_peer.get(peer)

    def numbered(self, number: int) -> Client | None:
        return self._by_number.get(number)

    def welcome(self, peer: bytes, name: str, wants_steps: bool, now: float) -> Client:
        """A new one. Raises OverloadedError when there are enough, InvalidRequestError for one that is here already."""
        if peer in self._by_peer:
            raise InvalidRequestError("a client says hello once")
        if len(self._by_peer) >= self._spec.max_clients:
            most = self._spec.max_clients
            raise OverloadedError(f"the engine has {most} clients already, and takes no more", retry_after=_RETRY_AFTER)
        self._last_number += 1
        client = Client(self._last_number, peer, name, wants_steps, now)
        self._by_peer[peer] = self._by_number[client.number] = client
        return client

    def leave(self, client: Client) -> AbortRequests | None:
        """It is not known any more. Returns what ends its requests; None: it has none."""
        del self._by_peer[client.peer], self._by_number[client.number]
        live, client.live = client.live, set()
        return AbortRequests(sorted(live)) if live else None

    def silent(self, now: float) -> list[Client]:
        """Those that nothing has been heard of for too long."""
        return [client for client in self._by_peer.values() if now - client.heard_at > self._spec.client_timeout]

    def taken_in(self, taken: Iterable[tuple[int, int, int]]) -> None:
        """The engine has taken in messages of clients: number, samples, bytes of each."""
        for number, samples, size in taken:
            client = self._by_number.get(number)
            if client is not None:
                client.admitted += samples
                client.untaken_bytes -= size

    def received(self, client: Client, size: int, now: float) -> None:
        """A message has come that the engine will take in. Raises OverloadedError for one too many."""
        client.heard_at = now
        client.untaken_bytes += size
        if client.untaken_bytes > self._spec.max_untaken_bytes:
            raise OverloadedError(f"{client.untaken_bytes} bytes of this client wait for the engine")

    def read(self, client: Client, read_bytes: int, now: float) -> None:
        """The client tells how much it has read. Raises InvalidRequestError for more than it was sent."""
        client.heard_at = now
        if not client.read_bytes <= read_bytes <= client.sent_bytes:
            raise InvalidRequestError("a client cannot have read what it was not sent")
        client.read_bytes = read_bytes

    def sent(self, client: Client, size: int) -> None:
        """A message is about to be sent. Raises OverloadedError when the client reads too slowly for it."""
        client.sent_bytes += size
        unread = client.sent_bytes - client.read_bytes
        if unread > self._spec.max_unread_bytes:
            raise OverloadedError(f"{unread} bytes are unread by this client: it is too slow")


# What a request from a client must be like, so that it can harm no other. An engine trusts its owner; a client of a
# door is a gateway, too, but not the one that started the engine.

_INT32 = 1 << 31
_INT64 = 1 << 63
_MOST_SAMPLES = 1024
_MOST_CHARS = 1 << 10
"""Of a tenant, a salt, an adapter's key."""
_MOST_GRAMMAR_CHARS = 1 << 19
_MOST_LISTED = 1 << 12
"""Entries of lists that every step goes through."""
_MOST_LOGPROBS = 1 << 10


def check_request(request: AddRequest, info: ModelInfo, adapters: Collection[str]) -> None:
    """Raises InvalidRequestError, NotFoundError, UnsupportedError. `adapters`: keys that the engine knows. What the
    scheduler's intake checks of all requests is not checked here."""
    _require(len(request.ids) <= _MOST_SAMPLES, "ids")
    _require(abs(request.priority) <= _INT32, "priority")
    _require(0 <= request.cache_retention <= _INT32, "cache_retention")
    for name in ("tenant", "cache_salt", "adapter"):
        _require(len(getattr(request, name)) <= _MOST_CHARS, name)
    if request.adapter and request.adapter not in adapters:
        raise NotFoundError("The engine does not have the request's LoRA adapter.")
    if isinstance(request.params, SamplingParams):
        _check_sampling(request.params, info)


def _check_sampling(params: SamplingParams, info: ModelInfo) -> None:
    counts = [count for count in (params.logprobs, params.prompt_logprobs) if count is not None]
    if counts and not info.supports_logprobs:
        raise UnsupportedError("This model's engine does not give logprobs.", param="logprobs")
    _require(all(0 <= count <= _MOST_LOGPROBS for count in counts), "logprobs")
    for name, low, high in _RANGES:
        _require(low <= getattr(params, name) <= high, name)
    _require(params.seed is None or -_INT64 <= params.seed < _INT64, "seed")
    _require(len(params.logit_bias) <= _MOST_LISTED, "logit_bias")
    _require(_tokens(params.logit_bias, info) and all(map(math.isfinite, params.logit_bias.values())), "logit_bias")
    _require(len(params.stop_token_ids) <= _MOST_LISTED and _tokens(params.stop_token_ids, info), "stop_token_ids")
    _require(len(params.bad_words) <= _MOST_LISTED, "bad_words")
    _require(all(row and _tokens(row, info) for row in params.bad_words), "bad_words")
    _require(_tokens(params.prediction, info), "prediction")
    allowed = params.allowed_token_ids
    _require(allowed is None or (len(allowed) > 0 and _tokens(allowed, info)), "allowed_token_ids")
    _require(len(params.processors) <= _MOST_LISTED, "processors")
    if params.grammar is not None:
        _require(len(params.grammar.text) <= _MOST_GRAMMAR_CHARS, "grammar")


_RANGES = (
    ("max_tokens", 1, _INT32),
    ("min_tokens", 0, _INT32),
    ("temperature", 0.0, 1e3),
    ("top_p", 1e-12, 1.0),
    ("top_k", 0, _INT32),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -1e3, 1e3),
    ("frequency_penalty", -1e3, 1e3),
    ("repetition_penalty", 1e-6, 1e6),
)
"""Wider than what gateways let through: these are what an engine can compute with. NaN is in none of them."""


def _tokens(ids: Iterable[int], info: ModelInfo) -> bool:
    return all(0 <= token_id < info.vocab_size for token_id in ids)


def _require(holds: bool, field: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{field} is out of bounds.", param=field)
