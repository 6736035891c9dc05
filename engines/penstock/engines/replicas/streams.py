"""The streams between replicas and clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import RequestError
from penstock.engines.replicas.replica import Replica
from penstock.engines.replicas.routing import RoutedRequest
from penstock.engines.replicas.sample import Sample


class Part:
    """Samples of one request that are together at one replica, or that wait for one."""

    def __init__(
        self, client: ReplicatedStream, samples: Iterable[Sample], routed: RoutedRequest, tried: Iterable[int] = ()
    ) -> None:
        self.client = client
        self.samples = list(samples)
        """Those that have not ended."""
        self.routed = routed
        self.tried = set(tried)
        """Numbers of replicas that have refused it, or died with it."""
        self.replica: Replica | None = None
        """None while it waits for one."""
        self.life = 0
        """The replica's, when it was sent there."""
        self.hands_over = False
        """Its replica computes the prompt and the first tokens only."""
        self.is_handed_over = False
        """Another replica has done that."""
        self.stream: RequestStream | None = None
        """The replica's."""
        self.by_id: dict[int, Sample] = {}
        """By the ids that the replica knows."""
        self._to_compute = 0
        """What the replica was told to expect; 0 from its first output on."""

    @property
    def adapter(self) -> str:
        return self.samples[0].message.adapter

    @property
    def is_taken_in(self) -> bool:
        """It has tokens, or its replica has looked at it: it is not refused any more."""
        if not self.samples or any(sample.tokens for sample in self.samples):
            return True
        if self.replica is None or self.stream is None:
            return False
        return self.stream.is_taken_in(self.replica.engine.stats)

    def at(self, replica: Replica, stream: RequestStream, ids: Sequence[int], to_compute: int) -> None:
        """The replica has got it, under these ids, with so many tokens that are probably not cached."""
        self.replica, self.stream, self.life = replica, stream, replica.life
        self.by_id = dict(zip(ids, self.samples, strict=True))
        self._to_compute = to_compute
        replica.sent(stream, len(ids), self.routed.num_tokens, to_compute)

    def begun(self) -> None:
        """Something came of it, or nothing will: nobody waits for its prompt any more."""
        if self._to_compute and self.replica is not None and self.life == self.replica.life:
            self.replica.begun(self.routed.num_tokens, self._to_compute)
        self._to_compute = 0

    def forget(self, sample: Sample) -> list[int]:
        """The sample ends, or goes away. Returns the id that its replica knows it by."""
        self.samples.remove(sample)
        ids = [request_id for request_id, known in self.by_id.items() if known is sample]
        for request_id in ids:
            del self.by_id[request_id]
        if not self.samples:
            self.begun()
        return ids


class ReplicatedStream(RequestStream):
    """What one client call gets of the replicas that compute its requests."""

    def __init__(self, ids: Iterable[int], abort: Callable[[Sequence[int]], None]) -> None:
        super().__init__(ids, abort)
        self.parts: list[Part] = []
        """Of its requests, wherever they are."""

    def is_taken_in(self, stats: EngineStats) -> bool:
        """By each replica's own count: the sum of all says nothing of one."""
        return all(part.is_taken_in for part in self.parts)


class WaitingPart:
    """A part that no replica can take now."""

    __slots__ = ("error", "next_try", "part", "until")

    def __init__(self, part: Part, error: RequestError, until: float, next_try: float) -> None:
        self.part = part
        self.error = error
        """What its client is told if none can in time."""
        self.until = until
        self.next_try = next_try
