"""Headers that go to the model, and patterns that no header can make slow."""

from __future__ import annotations

import re

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.parameters import MAX_HEADERS, forward_pattern, forwarded, forwarded_http


def pattern(text: str) -> re.Pattern[str]:
    found = forward_pattern(text)
    assert found is not None
    return found


def test_matching_headers_become_string_parameters() -> None:
    headers = [
        (b"x-user", b"ann"),
        (b"host", b"h"),
        (b"x-Team", b"caf\xe9"),
        (b"my-x-user", b"no"),
        (b"x-user", b"bob"),
    ]
    assert forwarded_http(headers, pattern("X-.*")) == {"x-user": "ann", "x-Team": "café"}


def test_the_whole_name_has_to_match() -> None:
    assert forwarded([("prefix_a", "1"), ("prefix_", "2"), ("a_prefix_a", "3")], pattern("prefix_.|other")) == {
        "prefix_a": "1"
    }


def test_case_matters_when_the_operator_says_so() -> None:
    headers = [("x-a", "1"), ("X-B", "2")]
    assert forwarded(headers, pattern("(?-i)x-.*")) == {"x-a": "1"}
    with pytest.raises(ValueError, match="never matches"):
        forward_pattern("(?-i)X-.*")


def test_no_setting_no_pattern() -> None:
    assert forward_pattern("") is None


@pytest.mark.parametrize(
    "name", ["sequence_id", "priority", "timeout", "headers", "binary_data_output", "triton_x", "sequence_start"]
)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"the header '{name}' cannot be forwarded"):
        forwarded([(name, "1")], pattern(".*"))
    assert forwarded([(name, "1")], pattern("x-.*")) == {}


def test_so_many_headers_and_no_more() -> None:
    headers = [(f"x-{index}", "1") for index in range(MAX_HEADERS + 1)]
    assert len(forwarded(headers[:-1], pattern("x-.*"))) == MAX_HEADERS
    with pytest.raises(InvalidRequestError, match="at most 64 headers"):
        forwarded(headers, pattern("x-.*"))


def test_endless_names_match_nothing() -> None:
    assert forwarded([("x" * 129, "1"), ("x" * 128, "2")], pattern("x*")) == {"x" * 128: "2"}


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+",
        "(a|a)*",
        "(x.*){5}",
        "(?:a*)*b",
        ".*a.*b.*c",
        r"(a)\1",
        "(?=a)a",
        "(?<!a)b",
        "(?P<n>a)(?P=n)",
        "a++",
        "(",
        "[",
        "a{99999999999}",
        "x" * 513,
    ],
)
def test_patterns_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="header pattern"):
        forward_pattern(text)


@pytest.mark.parametrize("text", ["x-.*", "x-(a|b)", "(?:x|y)-[a-z]+", r"x\+\*\(y\)*", "a.*|b.*|c.*|d.*", "x{2,}y?"])
def test_patterns_that_are_fine(text: str) -> None:
    assert pattern(text).pattern == text
