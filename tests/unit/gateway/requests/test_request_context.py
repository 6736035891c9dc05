"""What the front knows of a request before anything of it is read."""

from __future__ import annotations

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.requests.context import RequestContext, read_context, timeout_seconds

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("given", "expected"),
    [(b"mine-7", "mine-7"), (b"a b\r\n<c>", "abc"), (b"x" * 500, "x" * 128), (b"\xff\xfe@", "@")],
)
def test_the_callers_id_is_cut_and_cleaned(given: bytes, expected: str) -> None:
    assert read_context({b"x-request-id": given}).id == expected


@pytest.mark.parametrize("given", [b"", b"\r\n", b"<>"])
def test_an_id_without_usable_characters_is_replaced(given: bytes) -> None:
    first, second = read_context({b"x-request-id": given}).id, read_context({}).id
    assert len(first) == len(second) == 32
    assert first != second


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        (PARENT, True),
        (PARENT.upper(), False),
        (PARENT + "-more", False),
        (PARENT.replace("00-", "ff-", 1), False),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", False),
        ("", False),
    ],
)
def test_only_a_valid_parent_span_is_taken(given: str, valid: bool) -> None:
    context = read_context({b"traceparent": given.encode(), b"tracestate": b"a=1"})
    assert context.traceparent == (given if valid else "")
    assert context.tracestate == ("a=1" if valid else "")


def test_the_earlier_deadline_holds() -> None:
    context = RequestContext(arrival=100.0)
    context.limit(5)
    context.limit(9)
    assert context.deadline == 105
    context.limit(2)
    assert context.deadline == 102


def test_the_next_request_of_a_stream_has_the_same_caller_and_its_own_times() -> None:
    context = RequestContext(arrival=0.0, deadline=7.0, traceparent=PARENT)
    following = context.next_request()
    assert (following.deadline, following.traceparent, following.principal) == (7.0, PARENT, context.principal)
    assert following.id != context.id
    assert following.arrival > 0


@pytest.mark.parametrize("given", ["0", "-1", "1e3", "nan", "", "1.", " 1", "9" * 10])
def test_a_time_that_is_no_number_above_zero_is_refused(given: str) -> None:
    with pytest.raises(InvalidRequestError, match="X-Request-Timeout"):
        timeout_seconds(given)
