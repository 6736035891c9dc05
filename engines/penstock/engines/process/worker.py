"""The engine process: `python -m penstock.engines.process.worker HEARTBEAT_PIPE BLACK_BOX ENGINE`.

HEARTBEAT_PIPE and BLACK_BOX are file descriptors that it has inherited. What it has to do comes as one line on stdin,
an Order; until then it imports what ENGINE needs, if that is a name.

Stdin stays open for as long as the gateway lives: at its end this process ends too. Signals to the terminal's process
group are the gateway's business, which drains before it closes stdin.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq

from penstock.engines.contract.core import Core
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.loading import Loading, Report
from penstock.engines.contract.messages import CallReply, LoadFailed, Ready, RequestOutput, StepOutputs, StepRecord
from penstock.engines.host.black_box import record_into
from penstock.engines.host.failure_text import as_load_error, is_failure
from penstock.engines.host.parent_death import die_with_parent
from penstock.engines.host.placement import bind
from penstock.engines.host.terminal import line_end
from penstock.engines.process.heartbeat import HeartbeatThread
from penstock.engines.process.wire import Socket, context, decode_down, decode_owner, encode, pair_socket, receive_all
from penstock.engines.registry import EngineSpec, Order, import_engine, load_core

if TYPE_CHECKING:
    from penstock.engines.door.door import Door

logger = logging.getLogger(__name__)
_INTERVAL = 0.2


class LoadingReports:
    """Is a Report."""

    def __init__(self, send: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self.stage = ""
        """The newest."""
        self._next = 0.0

    def __call__(self, loading: Loading) -> None:
        now = self._clock()
        complete = loading.total > 0 and loading.done >= loading.total
        if loading.stage != self.stage or complete or now >= self._next:
            self.stage = loading.stage
            self._next = now + _INTERVAL
            self._send(loading)


class Publisher:
    """Holds back the tokens of running streams until `interval` seconds have passed since the last message.

    First tokens, ends, errors and replies leave at once, together with what was held back. A small model takes less
    than a millisecond for a step; waking the gateway and all clients for each would take cores away from the model.
    """

    def __init__(self, send: Callable[[StepOutputs], None], interval: float, clock: Callable[[], float]) -> None:
        self._send = send
        self._interval = interval
        self._clock = clock
        self._last_sent = clock()
        self._outputs: list[RequestOutput] = []
        self._steps: list[StepRecord] = []
        self._replies: list[CallReply] = []

    def add(self, result: StepOutputs) -> None:
        """Takes in one step's result."""
        self._outputs += result.outputs
        self._steps += result.steps
        self._replies += result.replies
        if result.replies or any(map(_is_urgent, result.outputs)) or self._since_last() >= self._interval:
            self.flush(result.stats)

    def flush(self, stats: EngineStats) -> None:
        """Sends everything there is; with nothing held back, the stats alone."""
        self._send(StepOutputs(self._outputs, stats, self._steps, self._replies))
        self._outputs, self._steps, self._replies = [], [], []
        self._last_sent = self._clock()

    @property
    def holds_back(self) -> bool:
        return bool(self._outputs or self._steps)

    def patience(self, at_idle: float) -> float:
        """Seconds until the next `flush` is due: for what is held back, or for newer stats every `at_idle` seconds."""
        return max(0.0, (self._interval if self.holds_back else at_idle) - self._since_last())

    def _since_last(self) -> float:
        return self._clock() - self._last_sent


def _is_urgent(output: RequestOutput) -> bool:
    return output.finish_reason is not None or output.prompt is not None


_STATS_INTERVAL = 1.0
"""Seconds between two messages at idle: the gauges of an engine that runs by itself change without a step."""
_FAREWELL_MS = 2000
"""How long the last message may take to leave."""
_CLOSING_TIME = 10.0
"""Seconds that a broken engine has to release what it holds."""


def serve(
    core: Core, socket: Socket, parent: int, publish_interval: float, heart: HeartbeatThread, door: Door | None = None
) -> int:
    """Steps while there is work, and waits while there is none. Returns an exit status: 0 when the gateway is gone, 1
    when the core cannot continue."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(parent, zmq.POLLIN)
    for descriptor in core.wakeups:
        poller.register(descriptor, zmq.POLLIN)
    if door is None:
        publisher = Publisher(lambda message: socket.send(encode(message)), publish_interval, time.monotonic)
    else:
        publisher = Publisher(partial(_send_through, door, socket), publish_interval, time.monotonic)
        poller.register(door.wakeup, zmq.POLLIN)
    while not core.broken and not (door is not None and door.failed):
        if not core.has_work:
            patience = publisher.patience(_STATS_INTERVAL)
            look = core.next_look
            if look is not None:
                patience = min(patience, max(0.0, look - time.monotonic()))
            events = dict(poller.poll(math.ceil(patience * 1e3)))
            if parent in events:
                return 0
            if not events and (look is None or look > time.monotonic()):
                publisher.flush(core.stats())
                continue
        heart.step_begins()
        received = receive_all(socket)
        messages = map(decode_down, received) if door is None else door.with_clients(map(decode_owner, received))
        result = core.step(messages)
        if door is not None:
            result.replies += door.replies()
        heart.step_ends()
        publisher.add(result)
    publisher.flush(core.stats())
    logger.error("the engine cannot continue: this process ends")
    return 1


def _send_through(door: Door, socket: Socket, message: StepOutputs) -> None:
    own = door.deliver(message)
    if own is not None:
        socket.send(encode(own))


def _open_door(spec: EngineSpec, core: Core, heart: HeartbeatThread) -> Door:
    """Raises EngineError when nothing can listen at its address."""
    from penstock.engines.door.door import open_door

    return open_door(spec, core.info, heart.now)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ring = record_into(int(sys.argv[2]))
    die_with_parent()  # even a step that never returns must not outlive the gateway
    with suppress(Exception):  # loading imports it again, and reports what is wrong with it
        import_engine(sys.argv[3])
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # it was not needed
    order = msgspec.json.decode(line, type=Order)
    spec = order.spec
    log = logging.StreamHandler(sys.stderr)
    log.terminator = line_end(sys.stderr)
    logging.basicConfig(level=order.log_level, format="%(asctime)s %(levelname)-7s engine: %(message)s", handlers=[log])
    socket = pair_socket()
    socket.connect(order.address)
    reports = LoadingReports(lambda loading: socket.send(encode(loading)))
    try:
        bind(spec.placement)  # before there are threads, and before a library counts CPUs
        heart = HeartbeatThread(int(sys.argv[1]), spec.heartbeat_interval, time.monotonic)
        heart.start()
        heart.core = core = load_core(spec, time.monotonic, reports)
        core.ring = ring
        door = None if spec.door is None else _open_door(spec, core, heart)
    except BaseException as error:
        if not is_failure(error):
            raise
        socket.send(encode(LoadFailed(as_load_error(error, spec.shown_settings, reports.stage).message)))
        _farewell(socket)
        return 1
    socket.send(encode(Ready(core.info)))
    gc.freeze()  # what loading left behind never becomes garbage
    status = serve(core, socket, sys.stdin.fileno(), spec.publish_interval, heart, door)
    if door is not None:
        door.close("the engine has failed" if status else "the engine was stopped")
    if status:
        _end_within(_CLOSING_TIME, status)
        _farewell(socket)
    core.close()
    return status


def _farewell(socket: Socket) -> None:
    """Waits until what was sent has left; the process ends next."""
    socket.close(linger=_FAREWELL_MS)
    context.term()


def _end_within(seconds: float, status: int) -> None:
    """A broken engine may never come back from closing."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # destructors of native libraries have nothing left to save and may hang
