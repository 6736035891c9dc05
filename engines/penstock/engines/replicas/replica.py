"""One of the replicas: its engine, and what is known of it beyond what the engine says."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from penstock.engines.client.engine import Engine
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.model_info import ModelInfo
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
        self.checked: ModelInfo | None = None
        """What the engine was when it was last compared with the others'."""
        self._admitted = 0
        self._is_told = False
        """That all is gone, and nothing was admitted since."""
        self._unseen: deque[tuple[RequestStream, int]] = deque()
        """What it was sent and has not told of yet, with the number of samples."""
        self._to_compute = 0
        """Tokens of requests that it was sent and that have had no output: those that are probably not cached."""
        self._not_begun = 0
        """All tokens of these requests, as its own numbers count them while they wait."""

    def sent(self, stream: RequestStream, num_samples: int, num_tokens: int, to_compute: int) -> None:
        """A request with so many tokens, of which so many are probably not cached."""
        self.num_routed += num_samples
        self._unseen.append((stream, num_samples))
        self._not_begun += num_tokens
        self._to_compute += to_compute

    def begun(self, num_tokens: int, to_compute: int) -> None:
        """Such a request, sent in this life, has had its first output, or has gone."""
        self._not_begun -= num_tokens
        self._to_compute -= to_compute

    def load(self) -> ReplicaLoad:
        """By its newest numbers, and what they cannot contain yet."""
        stats = self.engine.stats
        unseen = self._unseen
        while unseen and _is_seen(unseen[0][0], stats):
            unseen.popleft()
        num_requests = stats.num_running + stats.num_waiting + sum(samples for _, samples in unseen)
        of_others = max(0, stats.num_waiting_tokens - self._not_begun)  # where other gateways use it, too
        num_free = stats.num_free_blocks if stats.num_blocks else None
        return ReplicaLoad(self.number, num_requests, self._to_compute + of_others, num_free)

    def was_restarted(self) -> bool:
        """Whether the engine counts from 0 again since the last call, and `lost` was not called for that already:
        nothing of what it was sent is there any more."""
        admitted, before = self.engine.stats.admitted, self._admitted
        self._admitted = admitted
        if admitted == before:
            return False
        was_told, self._is_told = self._is_told, False
        return admitted < before and not was_told

    def lost(self) -> None:
        """All that the engine held is gone."""
        self.life += 1
        self._is_told = True
        self._unseen.clear()
        self._to_compute = self._not_begun = 0


def _is_seen(stream: RequestStream, stats: EngineStats) -> bool:
    """What has ended counts as seen: over a new connection to the same engine its number would be reached late, and
    until then all that is sent after it would count as unseen, too."""
    return stream.is_taken_in(stats) or not stream.live_ids
