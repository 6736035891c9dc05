"""A stream's window bounds what lies between host and reader, and never stops a stream for good."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.processes.model_host.messages import MAX_BYTES, MAX_RESPONSES, ReadWindow, SendWindow

sizes = st.lists(st.sampled_from([0, 1, 1000, MAX_BYTES // 3, MAX_BYTES - 1, 3 * MAX_BYTES]), max_size=120)


@given(sizes, st.randoms(use_true_random=False))
def test_every_response_arrives_and_few_are_on_their_way(sizes: list[int], turns: object) -> None:
    host, front = SendWindow(), ReadWindow()
    waiting, between, reports = deque(sizes), deque[int](), deque[tuple[int, int]]()
    taken = 0
    while taken < len(sizes):
        moves = []
        if waiting and host.open:
            moves.append("send")
        if between:
            moves.append("take")
        if reports:
            moves.append("report")
        assert moves, "the host waits for a reader that has taken everything"
        move = turns.choice(moves)  # type: ignore[attr-defined]
        if move == "send":
            host.sent(waiting[0])
            between.append(waiting.popleft())
            assert len(between) <= MAX_RESPONSES
            assert sum(between) < MAX_BYTES + max(between)
        elif move == "take":
            taken += 1
            report = front.take(between.popleft())
            if report is not None:
                reports.append(report)
        else:
            host.taken(*reports.popleft())
