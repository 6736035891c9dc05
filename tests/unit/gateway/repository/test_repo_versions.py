"""Version policies, against what Triton 2.51 does."""

from __future__ import annotations

import logging

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelVersionPolicy

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.repository.layout import select_versions


def policy(text: str) -> ModelVersionPolicy:
    return text_format.Parse(text, ModelVersionPolicy())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latest { num_versions: 1 }", [10]),
        ("latest { num_versions: 2 }", [3, 10]),
        ("latest { num_versions: 4000000000 }", [1, 3, 10]),
        ("all { }", [1, 3, 10]),
        ("", [1, 3, 10]),
        ("specific { versions: [ 3, 1 ] }", [1, 3]),
    ],
)
def test_policies(text: str, expected: list[int]) -> None:
    assert select_versions(policy(text), [10, 1, 3]) == expected


def test_a_listed_version_that_is_not_there_is_logged_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert select_versions(policy("specific { versions: [ 1, 7 ] }"), [1, 2], "m") == [1]
    assert caplog.messages == ["version 7 is specified for model 'm', but the version directory is not present"]


@pytest.mark.parametrize(
    ("text", "available", "there_is"),
    [
        ("latest { num_versions: 1 }", [], "none: model files lie in a folder .* such as m/1"),
        ("latest { }", [1], "1"),
        ("all { }", [], "none: .*"),
        ("specific { }", [3, 1], "1, 3"),
        ("specific { versions: [ 70 ] }", range(27, 0, -1), r"1, 2, 3, 4, 5, 6, 7, 8, \.\.\."),
        ("specific { versions: [ -1 ] }", [1], "1"),
    ],
)
def test_nothing_left_to_serve(text: str, available: list[int], there_is: str) -> None:
    """Reports server#3384, #3623, #3687 (no version's folder) and #7052 (version -1: Triton looks for its folder)."""
    expected = (
        f"^at least one version must be available under the version policy of model 'm'; its folder has {there_is}$"
    )
    with pytest.raises(InvalidRequestError, match=expected):
        select_versions(policy(text), available, "m")
