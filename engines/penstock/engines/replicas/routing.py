"""The choice of a replica for a request. Plain data: no clock, no event loop, so that a simulation can use it as well.

The rule of `RoutingPolicy.PREFIX` counts everything in tokens that have to be computed before the request's first one:

    cost = prompt - cached            what is left to compute of the prompt
         + waiting                    the same of others that were sent there and have had no token yet
         + REQUEST_TOKENS * requests  those that run or wait there: each takes a part of every step
         + missing                    tokens that no block is free for: a request has to wait or to be preempted
         - SESSION_TOKENS             where the request's session was last

The least cost wins; of equals, the replica that was chosen least recently. So a cached prefix is worth exactly what it
saves: it draws requests to its replica until others there have asked for that much more than elsewhere. However long
it is, replicas beyond the load bound come last: those with more than MORE_REQUESTS and twice the requests of the least
busy one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.engines.replicas.state import RoutingPolicy
from penstock.kvcache import BlockHash, BlockHasher, HashChain

REQUEST_TOKENS = 32
"""What a request that runs or waits counts for. A prefix of 512 tokens is worth 16 requests more than elsewhere."""
SESSION_TOKENS = 256
"""What it is worth to stay where the session was: its answers are cached there, too, which nobody counts here."""
MORE_REQUESTS = 32
"""Of the load bound. A prefix of 1024 tokens is worth as many; a longer one would fill a replica beside idle ones."""
_MOST_SESSIONS = 16_384


class ReplicaLoad(NamedTuple):
    """What is known of a replica that can take the request."""

    replica: int
    """Its number."""
    num_requests: int = 0
    """Running, waiting, or sent and not yet part of the replica's own numbers."""
    num_waiting_tokens: int = 0
    """What is left to compute of those of them that have had no token yet."""
    num_free_blocks: int | None = None
    """None: not known."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What matters of a request; `Router.request` makes it."""

    num_tokens: int
    hashes: Sequence[BlockHash] = ()
    """Of its full blocks; none where the policy does not look at them."""
    session: str = ""
    num_handed: int = 0
    """Leading tokens whose keys and values are there for whatever replica gets it."""
    reported: Mapping[int, int] = field(default_factory=dict)
    """Leading tokens that replicas have cached by their own word, where they tell."""


class Router:
    """Knows what each replica has been sent."""

    def __init__(
        self,
        policy: RoutingPolicy,
        num_blocks: Sequence[int],
        block_size: int,
        hasher: BlockHasher | None = None,
    ) -> None:
        """`num_blocks`: of each replica's KV cache, `block_size` the tokens of a block. `hasher`: None for one of its
        own."""
        self._policy = policy
        self._block_size = block_size
        self._hasher = hasher or BlockHasher()
        self._indexes = [PrefixIndex(count) for count in num_blocks]
        self._sessions: dict[str, int] = {}
        """Session -> replica; least recently used first."""
        self._turn = 0
        self._turns = [0] * len(num_blocks)
        """When each was last chosen."""

    def request(
        self, token_ids: Sequence[int], *, adapter: str = "", salt: str = "", session: str = ""
    ) -> RoutedRequest:
        """Blocks are told apart by what the prefix cache tells them apart by: tokens, adapter and salt."""
        if self._policy is not RoutingPolicy.PREFIX:
            return RoutedRequest(len(token_ids))
        chain = HashChain(self._hasher, self._hasher.root(adapter=adapter, salt=salt), self._block_size)
        chain.extend(token_ids, len(token_ids) // self._block_size)
        return RoutedRequest(len(token_ids), chain.hashes, session)

    def rank(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> list[int]:
        """Numbers of these replicas, the best one first."""
        if self._policy is RoutingPolicy.ROUND_ROBIN:
            return sorted((load.replica for load in loads), key=self._turns.__getitem__)
        bound = load_bound(loads)
        costs = {
            load.replica: (load.num_requests > bound, self.cost(request, load), self._turns[load.replica])
            for load in loads
        }
        return sorted(costs, key=costs.__getitem__)

    def cached(self, request: RoutedRequest, replica: int) -> int:
        """Tokens of the prompt that the replica probably need not compute. One is always computed."""
        sent = self._indexes[replica].matched(request.hashes) * self._block_size
        cached = max(sent, request.reported.get(replica, 0), request.num_handed)
        return max(0, min(cached, request.num_tokens - 1))

    def to_compute(self, request: RoutedRequest, replica: int) -> int:
        """Tokens that are probably not cached there; at least one."""
        return max(1, request.num_tokens - self.cached(request, replica))

    def cost(self, request: RoutedRequest, load: ReplicaLoad) -> int:
        """In tokens; see the rule above."""
        to_compute = self.to_compute(request, load.replica)
        cost = to_compute + load.num_waiting_tokens + REQUEST_TOKENS * load.num_requests
        if load.num_free_blocks is not None:
            cost += max(0, to_compute - load.num_free_blocks * self._block_size)
        if request.session and self._sessions.get(request.session) == load.replica:
            cost -= SESSION_TOKENS
        return cost

    def sent(self, request: RoutedRequest, replica: int) -> None:
        """The replica has got the request."""
        self._turn += 1
        self._turns[replica] = self._turn
        self._indexes[replica].add(request.hashes)
        if request.session:
            self._sessions.pop(request.session, None)
            self._sessions[request.session] = replica
            if len(self._sessions) > _MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def computed(self, request: RoutedRequest, replica: int) -> None:
        """The replica has computed the prompt. One that reports what is cached says so itself from now on, and when it
        is evicted."""
        if replica in request.reported:
            self._indexes[replica].discard(request.hashes)

    def emptied(self, replica: int) -> None:
        """The replica's prefix cache is empty: it was restarted, or told to forget."""
        self._indexes[replica].clear()
        for session in [session for session, where in self._sessions.items() if where == replica]:
            del self._sessions[session]

    def num_known_blocks(self, replica: int) -> int:
        return len(self._indexes[replica])


def load_bound(loads: Sequence[ReplicaLoad]) -> int:
    """Requests that a replica may have and still be chosen for what it has cached."""
    least = min((load.num_requests for load in loads), default=0)
    return max(2 * least, least + MORE_REQUESTS)


_MOST_BLOCKS = 1 << 17
"""Whatever the size of the KV cache: an entry takes about 100 bytes."""


class PrefixIndex:
    """Remembers as many blocks as the replica's KV cache has, and forgets in the order in which a prefix cache evicts:
    what was used least recently first, and of one prompt its end before its beginning."""

    def __init__(self, num_blocks: int) -> None:
        self._capacity = min(num_blocks, _MOST_BLOCKS)
        self._blocks: dict[BlockHash, None] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def matched(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of a prompt it knows."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._blocks:
                return count
        return len(hashes)

    def add(self, hashes: Sequence[BlockHash]) -> None:
        """The replica has been sent a prompt with these blocks."""
        blocks = self._blocks
        for block_hash in reversed(hashes[: self._capacity]):
            blocks.pop(block_hash, None)
            blocks[block_hash] = None
        while len(blocks) > self._capacity:
            del blocks[next(iter(blocks))]

    def discard(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            self._blocks.pop(block_hash, None)

    def clear(self) -> None:
        """Its prefix cache is empty."""
        self._blocks.clear()
