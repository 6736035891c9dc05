"""Errors of other servers, as callers of this one get them."""

from __future__ import annotations

import email.utils
import json
import time

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.errors import UpstreamError, wire_shape
from penstock.gateway.models.upstream.failures import Redactor, failed_answer, in_band_error, retry_seconds

REDACT = Redactor(["", "sk-123"])


@pytest.mark.parametrize(
    ("status", "shown", "again", "unhealthy"),
    [
        (400, 400, False, False),
        (422, 400, False, False),
        (413, 413, False, False),
        (401, 502, False, False),
        (403, 502, False, False),
        (404, 502, False, False),
        (408, 504, False, False),
        (429, 429, True, False),
        (500, 502, False, True),
        (502, 502, True, True),
        (503, 503, True, True),
        (504, 504, False, True),
        (418, 502, False, False),
    ],
)
def test_a_status_decides_what_is_shown_tried_again_and_held_against_it(
    status: int, shown: int, again: bool, unhealthy: bool
) -> None:
    failure = failed_answer("m", status, None, b"{}", REDACT)
    assert (wire_shape(failure.error).status, failure.again, failure.unhealthy) == (shown, again, unhealthy)
    assert failure.kind == str(status)


def test_a_server_that_sheds_load_is_not_ill() -> None:
    failure = failed_answer("m", 503, 2.0, b"", REDACT)
    assert (failure.unhealthy, failure.error.retry_after) == (False, 2.0)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "bad sk-123 value", "param": "n"}},
        {"error": "bad sk-123 value"},
        {"object": "error", "message": "bad sk-123 value"},
        {"detail": "bad sk-123 value"},
    ],
)
def test_the_words_of_a_refusal_reach_the_caller_without_secrets(body: object) -> None:
    assert failed_answer("m", 400, None, json.dumps(body).encode(), REDACT).error.message == "bad *** value"


@pytest.mark.parametrize("body", [b"", b"\xff", b"[1]", b'{"error": {"message": 5}}', b"[" * 60_000])
def test_without_words_it_is_still_said_what_happened(body: bytes) -> None:
    assert "status 400" in failed_answer("m", 400, None, body, REDACT).error.message


def test_other_servers_words_have_a_bound_and_one_line() -> None:
    body = {"error": {"message": "a\n b\r\nc" + "x" * 5000, "param": "p" * 5000}}
    error = failed_answer("m", 400, None, json.dumps(body).encode(), REDACT).error
    assert error.message.startswith("a b cxxx")
    assert (len(error.message), len(error.param or "")) == (400, 400)


@pytest.mark.parametrize("code", [400, "422"])
def test_a_refusal_within_a_stream_is_the_callers(code: object) -> None:
    told = json.dumps({"message": "bad sk-123 value", "code": code, "param": "sk-123"}).encode()
    error = in_band_error("m", told, REDACT)
    assert (type(error), error.message, error.param) == (InvalidRequestError, "bad *** value", "***")
    assert isinstance(in_band_error("m", b'{"message": "x", "code": 500}', REDACT), UpstreamError)


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_seconds(None) is None
    assert retry_seconds(b" 2.5 ") == 2.5
    assert retry_seconds(b"-3") == 0
    assert retry_seconds(b"99999999") == 3600
    assert [retry_seconds(value) for value in (b"soon", b"nan", b"inf")] == [None, None, None]
    date = email.utils.formatdate(time.time() + 100, usegmt=True).encode()
    assert 90 < (retry_seconds(date) or 0) <= 100
