"""How long the body of a request may take."""

from __future__ import annotations

import pytest

from penstock.gateway.http.body_pace import BodyPace
from penstock.gateway.http.limits import ConnectionLimits

LIMITS = ConnectionLimits(body_idle_timeout=10.0, body_rate=100.0, body_timeout=60.0)


def body_pace() -> BodyPace:
    pace = BodyPace(LIMITS)
    pace.begin(1000.0)
    return pace


def test_an_idle_body_has_ten_seconds() -> None:
    pace = body_pace()
    assert (pace.seconds_left(1000.0), pace.seconds_left(1009.0), pace.seconds_left(1010.0)) == (10.0, 1.0, 0.0)
    pace.received(1009.0, 5000)
    assert pace.seconds_left(1010.0) == 9.0


@pytest.mark.parametrize(("num_bytes", "left"), [(500, 8.0), (499, 0.0)])
def test_after_that_it_has_to_keep_its_rate(num_bytes: int, left: float) -> None:
    pace = body_pace()
    pace.received(1013.0, num_bytes)
    assert pace.seconds_left(1015.0) == left


def test_the_whole_body_has_its_time_however_fast_it_comes() -> None:
    pace = body_pace()
    pace.received(1059.0, 1 << 20)
    assert (pace.seconds_left(1059.0), pace.seconds_left(1060.0)) == (1.0, 0.0)


def test_time_in_which_the_server_does_not_read_is_not_the_client_s() -> None:
    pace = body_pace()
    pace.not_read(1300.0)
    assert pace.seconds_left(1300.0) == 10.0
    pace.received(1305.0, 10)
    assert pace.seconds_left(1305.0) == 10.0
