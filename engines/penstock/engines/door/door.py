"""The door of an engine process: a thread of its own that speaks with clients, beside the loop that steps.

The loop hands over what a step has brought and takes what has come, both in a few microseconds; decoding, encoding and
sending happen in the thread (`reception.py`), while the loop's step computes. So a client's signs of life are answered
whatever the step does, and a client that sends nonsense costs the loop nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from copy import copy

from penstock.engines.contract.messages import (
    CallReply,
    CloseDoor,
    DownMessage,
    Heartbeat,
    OwnerMessage,
    RequestOutput,
    StepOutputs,
    StepRecord,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.door.clients import number_of
from penstock.engines.door.mail import DoorMail, KnownAdapters, News
from penstock.engines.door.messages import Welcome
from penstock.engines.door.reception import STATS_INTERVAL, Reception
from penstock.engines.door.spec import DoorSpec
from penstock.engines.registry import EngineSpec, engine_fingerprint

_JOIN_SECONDS = 3.0


class Door:
    """Opened when the model is loaded. Belongs to the loop."""

    def __init__(
        self,
        spec: DoorSpec,
        welcome: Welcome,
        adapters: Iterable[str],
        heartbeat: Callable[[], Heartbeat],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`welcome`: what clients are told; its adapters are those of the moment. Raises EngineError when nothing can
        listen at the address."""
        self.spec = spec
        self._clock = clock
        self._adapters = KnownAdapters(adapters)
        self._mail = DoorMail()
        self._told_adapters = self._adapters.keys
        self._taken: list[tuple[int, int, int]] = []
        """As `News.taken`."""
        self._admitted = 0
        """Samples of clients."""
        self._handed_over_at = self._owner_told_at = -math.inf
        self._steps: list[StepRecord] = []
        """That have not been handed over."""
        self._own_steps: list[StepRecord] = []
        """That the owner has not been told of."""
        self._replies: list[CallReply] = []
        self._reception = Reception(spec, welcome, self._adapters, self._mail, heartbeat, clock)
        self._thread = threading.Thread(target=self._reception.run, name="door", daemon=True)
        self._thread.start()

    @property
    def wakeup(self) -> int:
        """Readable while there is something for `with_clients` to take."""
        return self._mail.loop_wakeup

    @property
    def failed(self) -> bool:
        """No client can connect any more: a new process is needed."""
        return self._mail.failed

    def with_clients(self, own: Iterable[OwnerMessage]) -> Iterator[DownMessage]:
        """The owner's messages, then what clients have sent."""
        for message in own:
            if isinstance(message, CloseDoor):
                self._mail.drain()
                self._replies.append(CallReply(CloseDoor.call))
            else:
                self._adapters.requested(message)
                yield message
        for arrival in self._mail.take_arrivals():
            self._taken.append((arrival.number, arrival.samples, arrival.size))
            self._admitted += arrival.samples
            yield arrival.message

    def replies(self) -> list[CallReply]:
        """To the owner's messages that were for the door."""
        replies, self._replies = self._replies, []
        return replies

    def deliver(self, message: StepOutputs) -> StepOutputs | None:
        """Hands over what is for clients; returns the owner's part. None: that has nothing but stats, and the last ones
        are not old."""
        for reply in message.replies:
            self._adapters.replied(reply)
        message.stats.admitted_of_others = self._admitted
        return self._divided(message) if self._reception.has_met else message

    def _divided(self, message: StepOutputs) -> StepOutputs | None:
        outputs: dict[int, list[RequestOutput]] = {}
        for output in message.outputs:
            outputs.setdefault(number_of(output.id), []).append(output)
        replies: dict[int, list[CallReply]] = {}
        for reply in message.replies:
            replies.setdefault(number_of(reply.call), []).append(reply)
        own, own_replies = outputs.pop(0, []), replies.pop(0, [])
        now = self._clock()
        self._steps += message.steps
        if outputs or replies or self._taken or self._has_news(now):
            self._hand_over(News(outputs, replies, copy(message.stats), self._steps, self._taken), now)
        self._own_steps += message.steps
        if not own and not own_replies and now - self._owner_told_at < STATS_INTERVAL:
            return None
        self._owner_told_at = now
        own_steps, self._own_steps = self._own_steps, []
        return StepOutputs(own, message.stats, own_steps, own_replies)

    def _has_news(self, now: float) -> bool:
        """Of no client in particular."""
        return self._told_adapters is not self._adapters.keys or now - self._handed_over_at >= STATS_INTERVAL

    def _hand_over(self, news: News, now: float) -> None:
        self._steps, self._taken = [], []
        self._told_adapters = self._adapters.keys
        self._handed_over_at = now
        self._mail.hand_over(news)

    def close(self, reason: str) -> None:
        """Sends what there is, tells the clients why it is over, and goes."""
        self._mail.end(reason)
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():  # else it still waits for these descriptors, and they are freed with it
            self._mail.close()


def open_door(spec: EngineSpec, info: ModelInfo, heartbeat: Callable[[], Heartbeat]) -> Door:
    """`spec.door` is not None. Raises EngineError when nothing can listen at its address."""
    if spec.door is None:
        raise ValueError("this engine has no door")
    welcome = Welcome(
        info=info,
        fingerprint=engine_fingerprint(spec, info, spec.door.model),
        adapters=[],
        max_adapters=spec.options.get("max_loras", 0),
        policy=str(spec.scheduler.policy),
        most_unseen=2 * (spec.scheduler.max_queued_requests + spec.scheduler.max_num_seqs),
        max_message_bytes=spec.door.max_message_bytes,
        client_timeout=spec.door.client_timeout,
    )
    return Door(spec.door, welcome, spec.options.get("adapters") or {}, heartbeat)
