"""How long a body may take to come, and an answer to be taken."""

from __future__ import annotations

import pytest

from penstock.gateway.transports.sockets.connection import BodyPace, ReaderPace


def body_pace() -> BodyPace:
    return BodyPace(10.0, 100.0, 60.0, 1000.0, max_idle=10.0)


def late(pace: BodyPace, *looks: tuple[float, int]) -> list[bool]:
    """At so many seconds from the beginning, when so many bytes have come."""
    return [pace.late(1000.0 + seconds, received, waited=True) for seconds, received in looks]


def test_an_idle_body_has_ten_seconds() -> None:
    assert late(body_pace(), (9.0, 0), (10.0, 0), (10.1, 0)) == [False, False, True]
    assert late(body_pace(), (9.0, 5000), (18.9, 5000), (19.1, 5000)) == [False, False, True]


@pytest.mark.parametrize(("received", "expected"), [(500, False), (499, True)])
def test_after_that_it_has_to_keep_its_rate(received: int, expected: bool) -> None:
    assert late(body_pace(), (13.0, 400), (15.0, received)) == [False, expected]


def test_it_may_rest_where_that_is_not_limited() -> None:
    assert late(BodyPace(10.0, 100.0, 60.0, 1000.0), (9.0, 1000), (19.9, 1000), (20.1, 1000)) == [False, False, True]


def test_the_whole_body_has_its_time_however_fast_it_comes() -> None:
    looks = [(float(second), second << 20) for second in range(1, 62)]
    assert late(body_pace(), *looks) == [False] * 60 + [True]


def test_time_in_which_nobody_waits_for_it_is_not_the_client_s() -> None:
    pace = body_pace()
    assert not pace.late(1300.0, 0, waited=False)
    assert late(pace, (310.0, 0), (310.1, 0)) == [False, True]


def test_a_reader_is_idle_since_it_took_the_last_bytes() -> None:
    reader = ReaderPace(0.0)
    assert reader.idle_seconds(5.0, 0, 0) == 0.0
    assert [reader.idle_seconds(now, taken, 100) for now, taken in ((6.0, 50), (7.0, 50), (8.0, 51))] == [0.0, 1.0, 0.0]
    assert reader.idle_seconds(9.0, 51, 0) == 0.0, "nothing waits for it"


def test_how_long_a_reader_would_need_for_what_waits() -> None:
    reader = ReaderPace(0.0)
    reader.idle_seconds(1.0, 0, 10_000, held=90_000)
    reader.idle_seconds(2.0, 20_000, 10_000, held=70_000)
    assert reader.seconds_to_read == pytest.approx(80_000 / (20_000 + 1024))
