"""What this server reads of a body that is for another server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.upstream.requests import UpstreamRequest


def request(api: Any, **fields: object) -> UpstreamRequest:
    return UpstreamRequest(json.dumps({"model": "m", **fields}).encode(), api)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("text", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ([], 1), (None, 1), (["only"], 1)],
)
def test_each_prompt_has_its_choices(prompt: object, prompts: int) -> None:
    assert request("completions", prompt=prompt).choices == prompts
    assert request("completions", prompt=prompt, n=3).choices == 3 * prompts
    assert request("chat", prompt=prompt, n=3).choices == 3


@pytest.mark.parametrize("n", [0, 129, -1])
def test_choices_have_a_bound(n: int) -> None:
    with pytest.raises(InvalidRequestError, match="n must be"):
        request("chat", n=n)


def test_what_limits_are_charged_in_advance_has_a_bound() -> None:
    assert request("chat", max_tokens=10, n=2).expected_tokens < 40
    assert request("chat", max_tokens=1e300).expected_tokens < 2 << 20
