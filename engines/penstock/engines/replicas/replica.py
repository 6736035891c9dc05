"""One of the replicas: its engine, and what is known of it beyond what the engine says."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from penstock.engines.client.engine import Engine
from penstock.engines.client.stream import RequestStream
from penstock.engines.replicas.routing import ReplicaLoad


class Replica:
    def __init__(self, number: int, engine: Engine) -> None:
        self.number = number
        self.engine = engine
        self.life = 0
        """Counts up whenever all that the engine held is gone."""
        self.num_routed = 0
        """Samples that it was sent, since the start."""
        self.missing: dict[str, Path] = {}
        """Adapters that it has yet to load: key -> folder."""
        self.was_ready = True
        """When it was last looked at."""
        self._admitted = 0
        self._unseen: deque[tuple[RequestStream, int, int]] = deque()
        """What it was sent and has not told of yet, with samples and tokens."""

    def sent(self, stream: RequestStream, num_samples: int, num_tokens: int) -> None:
        self.num_routed += num_samples
        self._unseen.append((stream, num_samples, num_tokens))

    def load(self) -> ReplicaLoad:
        """By its newest numbers, and what they cannot contain yet."""
        stats = self.engine.stats
        unseen = self._unseen
        while unseen and unseen[0][0].is_taken_in(stats):
            unseen.popleft()
        num_requests = stats.num_running + stats.num_waiting + sum(samples for _, samples, _ in unseen)
        num_tokens = stats.num_waiting_tokens + sum(tokens for _, _, tokens in unseen)
        num_free = stats.num_free_blocks if stats.num_blocks else None
        return ReplicaLoad(self.number, num_requests, num_tokens, num_free)

    def was_restarted(self) -> bool:
        """Whether the engine counts from 0 again since the last call: nothing of what it was sent is there any more."""
        admitted, before = self.engine.stats.admitted, self._admitted
        self._admitted = admitted
        return admitted < before

    def lost(self) -> None:
        """All that the engine held is gone."""
        self.life += 1
        self._admitted = 0
        self._unseen.clear()
