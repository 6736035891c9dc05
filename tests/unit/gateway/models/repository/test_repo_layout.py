"""Names of models and versions: what leads out of a repository is refused, what merely looks odd is not."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelVersionPolicy

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.repository.layout import (
    EMPTY_NAME,
    available_versions,
    backend_of_name,
    check_model_name,
    check_version,
    is_model_name,
    select_versions,
)

REFUSED = [
    "../etc",
    "a/../b",
    "../../etc/passwd",
    "model/..",
    "..",
    ".",
    "/etc/passwd",
    "model/subdir",
    "model/",
    " ..",
    ".. ",
    "a b",
    "a\tb",
    "a\nb",
    "model\n",
    "a\0b",
    "%2e%2e%2f",
    "..%5c",
    "%252e",
    "..\\etc",
    "\uff0e\uff0e",
    "\u2024\u2024",
    "modèle",
    "a" * 256,
]


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_lead_elsewhere_are_refused_and_not_echoed(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_model_name(name)
    assert name == "." or name not in caught.value.message


@pytest.mark.parametrize("name", [name for name in REFUSED if "/" in name or name.strip() == ".."])
def test_names_of_other_folders_get_tritons_text(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="model name must not contain path traversal characters"):
        check_model_name(name)


@pytest.mark.parametrize("name", ["", " ", "\t", "\n", "\u2003"])
def test_empty_names_get_tritons_text(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(EMPTY_NAME)}$"):
        check_model_name(name)


@pytest.mark.parametrize(
    "name", ["...", "..my_model", "model..1", "add_sub", "Model-1.2", "nop_TYPE_FP32_-1,-1", "x" * 255, "0"]
)
def test_names_that_stay_in_the_repository_pass(name: str) -> None:
    assert check_model_name(name) == name


@given(st.text(max_size=300))
def test_what_passes_is_one_folder_below_the_repository(name: str) -> None:
    try:
        check_model_name(name)
    except InvalidRequestError:
        return
    root = Path("/repository")
    assert (root / name).resolve().parent == root
    assert name.isascii()
    assert name.isprintable()


def test_hidden_folders_are_no_models() -> None:
    assert [name for name in (".git", "..data", "add_sub", "a b", "") if is_model_name(name)] == ["add_sub"]


@pytest.mark.parametrize(
    ("text", "version"), [("1", 1), ("42", 42), ("1700000000", 1_700_000_000), ("9" * 18, 10**18 - 1)]
)
def test_versions_are_positive_integers(text: str, version: int) -> None:
    assert check_version(text) == version


@pytest.mark.parametrize(
    "text", ["", "0", "01", "-1", "+1", " 1", "1 ", "1.0", "1e3", "x", "9" * 19, "١", "1\n", "../1"]
)
def test_other_versions_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="version should be an integral value > 0"):
        check_version(text)


@given(st.text(max_size=64).filter(lambda text: re.fullmatch("[1-9][0-9]{0,17}", text, re.ASCII) is None))
def test_a_refused_version_cannot_forge_a_line(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_version(text)
    assert caught.value.message.isprintable()


def test_version_folders(tmp_path: Path) -> None:
    for name in ("1", "3", "20", "007", "0", "-4", "configs", "warmup"):
        (tmp_path / name).mkdir()
    (tmp_path / "5").write_text("a file, not a folder")
    assert available_versions(tmp_path) == [1, 3, 20]


def test_the_backend_in_a_name_is_what_follows_the_first_dot() -> None:
    assert backend_of_name("model.identity") == "identity"
    assert backend_of_name("a.b.c") == "b.c"
    assert backend_of_name("plain") == ""


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
def test_a_version_policy_selects_the_versions_to_serve(text: str, expected: list[int]) -> None:
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
