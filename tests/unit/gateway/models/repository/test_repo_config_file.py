"""Configuration files and overrides: whatever they hold, a configuration or one of our errors comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.models.repository.config_file import MAX_CONFIG_BYTES, read_config

FIELDS = ["name", "input", "dims", "data_type", "max_batch_size", "TYPE_FP32", "version_policy", "parameters", "key"]


def folder_with(tmp_path: Path, text: str | bytes, file: str = "config.pbtxt") -> Path:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path


def refusal(folder: Path, override: str | None) -> str:
    """The message of the refusal; "" for a configuration."""
    try:
        assert read_config(folder, "m", override=override).name == "m"
    except InvalidRequestError as error:
        return error.message
    return ""


def test_a_file_is_read_and_the_name_filled_in(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 'backend: "python"\nmax_batch_size: 4\ninput [ { name: "I" dims: [ -1, 2 ] } ]\n')
    config = read_config(folder, "m", override=None)
    assert (config.name, config.backend, config.max_batch_size, list(config.input[0].dims)) == (
        "m",
        "python",
        4,
        [-1, 2],
    )


def test_without_a_file_the_configuration_is_empty(tmp_path: Path) -> None:
    config = read_config(tmp_path, "m", override=None)
    assert [field.name for field, _ in config.ListFields()] == ["name"]


def test_a_named_configuration_wins_and_falls_back(tmp_path: Path) -> None:
    folder = folder_with(folder_with(tmp_path, "max_batch_size: 1"), "max_batch_size: 2", "configs/h100.pbtxt")
    found = [read_config(folder, "m", override=None, config_name=name).max_batch_size for name in ("", "h100", "a10")]
    assert found == [1, 2, 1]


@pytest.mark.parametrize("name", ["../config", "/etc/passwd", "a/b", ".hidden", "a\n"])
def test_a_named_configuration_is_a_files_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be a file's name"):
        read_config(tmp_path, "m", override=None, config_name=name)


def test_an_override_replaces_the_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 'backend: "python"\nmax_batch_size: 4')
    config = read_config(folder, "m", override='{"backend": "onnxruntime", "input": [{"name": "I", "dims": [2, "3"]}]}')
    assert (config.backend, config.max_batch_size, list(config.input[0].dims)) == ("onnxruntime", 0, [2, 3])


@pytest.mark.parametrize(
    "override",
    [
        '{backend: "python", max_batch_size : 4}',
        "{'backend': 'python', 'max_batch_size': 4}",
        '{"backend": "python", "max_batch_size": 4, }',
        '{"backend": "python", "max_batch_size": 4, "input": [{"name": "I", "dims": [1,],},],}',
        '{"backend": "python", "max_batch_size": 4, "parameters": {"k": {"string_value": "a\tb: \'c\', d"}}, }',
    ],
)
def test_an_override_may_be_as_loose_as_triton_s_parser_is(tmp_path: Path, override: str) -> None:
    config = read_config(tmp_path, "m", override=override)
    assert (config.backend, config.max_batch_size) == ("python", 4)
    assert [one.string_value for one in config.parameters.values()] in ([], ["a\tb: 'c', d"])


def test_quotes_in_an_override_stay_what_they_are(tmp_path: Path) -> None:
    override = """{parameters: {'it\\'s "k"': {string_value: 'x\\\\ \\"y\\" true: ,}'}}}"""
    [(key, value)] = read_config(tmp_path, "m", override=override).parameters.items()
    assert (key, value.string_value) == ('it\'s "k"', 'x\\ "y" true: ,}')


@pytest.mark.parametrize("override", [None, '{"name": "other"}'])
def test_the_name_must_be_the_folders(tmp_path: Path, override: str | None) -> None:
    expected = "^unexpected directory name 'm' for model 'other', directory name must equal model name$"
    with pytest.raises(InvalidRequestError, match=expected):
        read_config(folder_with(tmp_path, 'name: "other"'), "m", override=override)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('name: "m"\n  foo: 3', "m/config.pbtxt:2:3", 'no field named "foo"'),
        ("max_batch_size: 99999999999", "m/config.pbtxt:1:17", "out of range"),
        ("input [ { data_type: TYPE_X } ]", "m/config.pbtxt:1:22", "TYPE_X"),
        ("version_policy { latest { } all { } }", "m/config.pbtxt:1:29", "oneof"),
        ("input [ {", "m/config.pbtxt", "Expected"),
    ],
)
def test_errors_name_the_place_in_the_repository(tmp_path: Path, text: str, where: str, what: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_config(folder_with(tmp_path, text), "m", override=None)
    assert where in caught.value.message
    assert what in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_json_and_byte_order_marks(tmp_path: Path) -> None:
    """Report server#3593: what GET .../config has answered, saved as the file."""
    with pytest.raises(InvalidRequestError, match=r"^m/config\.pbtxt is JSON, .* in protobuf's text format$"):
        read_config(folder_with(tmp_path, '\n{ "name": "m", "max_batch_size": 4 }'), "m", override=None)
    assert (
        read_config(folder_with(tmp_path, b"\xef\xbb\xbfmax_batch_size: 4\r\n"), "m", override=None).max_batch_size == 4
    )


def test_errors_of_a_named_configuration_name_its_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"m/configs/gpu\.pbtxt:1:1"):
        read_config(folder_with(tmp_path, "foo: 3", "configs/gpu.pbtxt"), "m", override=None, config_name="gpu")


def test_files_that_are_no_text_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"^m/config\.pbtxt is not UTF-8$"):
        read_config(folder_with(tmp_path, b"\xff\xfe"), "m", override=None)
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_CONFIG_BYTES} bytes"):
        read_config(folder_with(tmp_path, b"#" * (MAX_CONFIG_BYTES + 1)), "m", override=None)


@pytest.mark.parametrize(
    "override",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        '{"foo": 1}',
        '{"backend": 3}',
        '{"input": {"a": 1}}',
        '{"max_batch_size": 1e999}',
        '{"max_batch_size": NaN}',
        '{"max_batch_size": ' + "9" * 5000 + "}",
        '{"name": "m", "name": "m"}',
        '{name: "m", "name": "m"}',
        '{"name": "m" /* it */}',
        '{"name": m}',
        '{"name": "m" "backend": "python"}',
        '{name: "m"} x',
        '{"name": "' + '\\"' * 400_000,
        "{'name': '" + "\\'" * 400_000,
        "{" + "a" * 900_000,
        "{" + ", " * 400_000,
        '{"backend": "\\ud800"}',
        '{"backend": "\ud800"}',
        '{"input": ' + "[" * 101 + "]" * 101 + "}",
        "[" * 250_000,
    ],
)
def test_bad_overrides(tmp_path: Path, override: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_config(tmp_path, "m", override=override)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_too_large_an_override_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    with pytest.raises(PayloadTooLargeError):
        read_config(tmp_path, "m", override="{" * (MAX_CONFIG_BYTES + 1))


junk = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from([*FIELDS, "{", "}", "[", "]", ":", '"', "1", "-1", "nan", "\\", "#", "\n", "'x'"])).map(
        " ".join
    ),
    st.binary(max_size=200),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(text=junk)
def test_junk_in_a_file_gives_a_configuration_or_our_error(tmp_path: Path, text: str | bytes) -> None:
    if isinstance(text, str):
        text = text.encode(errors="surrogatepass")
    folder = folder_with(tmp_path, text)
    message = refusal(folder, None)
    assert message.isprintable()
    assert str(tmp_path) not in message


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(document=st.dictionaries(st.sampled_from(FIELDS), values, max_size=4) | values, text=st.text(max_size=50))
def test_junk_in_an_override_gives_a_configuration_or_our_error(tmp_path: Path, document: object, text: str) -> None:
    for override in (json.dumps(document), text):
        assert refusal(tmp_path, override).isprintable()
