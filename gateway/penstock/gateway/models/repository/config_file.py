"""Reading a model's configuration: config.pbtxt, one of its named variants, or the JSON of a load request."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import json_format, text_format

from penstock.classic.loading import BACKEND_FILENAME
from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.models.repository.layout import ModelFileError
from penstock.gateway.models.repository.storage import LocalModel
from penstock.gateway.requests.bounded_json import check_json

CONFIG_FILE = "config.pbtxt"
MAX_CONFIG_BYTES = 1024 * 1024
"""Of a file or of an override; the largest configurations of real models have some kilobytes."""

_MAX_DETAIL_CHARS = 300
_LENIENT = re.compile(
    r""""(?:[^"\\]++|\\.)*+"?|'(?:[^'\\]++|\\.)*+'?|,(?=\s*[}\]])|(?P<word>[A-Za-z_$][\w$]*+)(?P<colon>\s*+:)?""",
    re.DOTALL,
)
"""Linear in the text: a string that does not end is one token up to the end."""
_ESCAPED_CONTROLS = {code: f"\\u{code:04x}" for code in range(32)}
_CONFIG_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", re.ASCII)


def read_config(folder: Path, name: str, *, override: str | None, config_name: str = "") -> ModelConfig:
    """The configuration as it was written; nothing is filled in but the name.

    `override` is JSON and replaces the files altogether. Else `configs/<config_name>.pbtxt` counts, or, if there is
    none, config.pbtxt. A model without any has an empty configuration, which its backend may complete.

    Raises InvalidRequestError: not to be parsed, an unknown field, or another model's name.
    """
    if override is not None:
        config = _from_json(override)
    else:
        path = config_path(folder, config_name)
        config = ModelConfig() if path is None else _from_text(path, f"{name}/{path.relative_to(folder).as_posix()}")
    if not config.name:
        config.name = name
    elif config.name != name:
        rule = "directory name must equal model name"
        text = f"unexpected directory name '{name}' for model '{_cut(config.name)}', {rule}"
        raise ModelFileError(text, f"unexpected directory name '{name}', {rule}")
    return config


def config_path(folder: Path, config_name: str) -> Path | None:
    """The file that holds the configuration, None for a model without one. Raises InvalidRequestError."""
    candidates = [folder / CONFIG_FILE]
    if config_name:
        if not _CONFIG_NAME.fullmatch(config_name):
            raise InvalidRequestError(f"the model configuration's name '{_cut(config_name)}' cannot be a file's name")
        candidates.insert(0, folder / "configs" / f"{config_name}.pbtxt")
    return next((path for path in candidates if path.is_file()), None)


def _from_text(path: Path, shown: str) -> ModelConfig:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"{shown} cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidRequestError(f"{shown} has more than {MAX_CONFIG_BYTES} bytes")
    if data.lstrip().startswith(b"{"):
        raise InvalidRequestError(f"{shown} is JSON, as GET .../config gives it; the file is in protobuf's text format")
    config = ModelConfig()
    try:
        text_format.Parse(data.decode("utf-8-sig"), config)  # editors on Windows begin files with a byte order mark
    except UnicodeDecodeError:
        raise InvalidRequestError(f"{shown} is not UTF-8") from None
    except text_format.ParseError as error:
        where = f"{shown}:{error.GetLine()}:{error.GetColumn()}" if error.GetLine() is not None else shown
        detail = re.sub(r"^\d+:\d+ : ", "", str(error))
        text = f"failed to read the model configuration {where}"
        raise ModelFileError(f"{text}: {_cut(detail)}", text) from None
    return config


def _from_json(text: str) -> ModelConfig:
    """The load request's `config`. What it says wrong is refused before protobuf sees what it could choke on."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("the model configuration of the load request is not UTF-8") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise PayloadTooLargeError(f"the model configuration has more than {MAX_CONFIG_BYTES} bytes")
    check_json(data, field="the model configuration")
    if not text.lstrip(" \t\r\n").startswith("{"):  # protobuf takes an empty list for an empty message
        raise InvalidRequestError("failed to parse the model configuration: it is not a JSON object")
    try:
        return _parsed(text)
    except json_format.ParseError as error:
        first = error
    strict = _LENIENT.sub(_strict_token, text)
    check_json(strict.encode(), field="the model configuration")
    try:
        return _parsed(strict)
    except json_format.ParseError:
        raise InvalidRequestError(f"failed to parse the model configuration: {_cut(str(first))}") from None


def _parsed(text: str) -> ModelConfig:
    config: ModelConfig = json_format.Parse(text, ModelConfig())
    return config


def _strict_token(match: re.Match[str]) -> str:
    """What Triton's JSON parser takes beyond JSON, as JSON: keys without quotes, strings in single quotes or with
    control characters, a comma after the last member."""
    token = match[0]
    if match["word"]:
        return f'"{match["word"]}"{match["colon"]}' if match["colon"] else token
    if token[0] == ",":
        return ""
    inside = token[1:-1].translate(_ESCAPED_CONTROLS)
    if token[0] == "'":
        inside = re.sub(r"\\.|\"", lambda part: {"\\'": "'", '"': '\\"'}.get(part[0], part[0]), inside)
    return f'"{inside}"'


def _cut(text: str) -> str:
    """The first line, in printable characters and at a bounded length: it goes into answers and logs."""
    line = "".join(char if char.isprintable() else "?" for char in text.partition("\n")[0])
    return line if len(line) <= _MAX_DETAIL_CHARS else line[: _MAX_DETAIL_CHARS - 1] + "…"


_MAX_COMPONENT_BYTES = 255
_MAX_PARTS = 9
"""Of a path: the version and eight more."""
_MAX_FILES = 10_000
_SHOWN_CHARS = 64


def check_files(files: Mapping[str, bytes]) -> None:
    """Refuses paths that are not plain names, possibly below folders, inside the model's folder: `1/model.onnx`,
    `labels.txt`, `warmup/sample`. A slash before them means nothing, as in Triton.

    Raises InvalidRequestError.
    """
    if len(files) > _MAX_FILES:
        raise InvalidRequestError(f"more than {_MAX_FILES} files in one load request")
    if BACKEND_FILENAME in map(_relative, files):
        raise InvalidRequestError(
            f"{BACKEND_FILENAME} runs in the server's own process: it has to lie in the repository, and cannot come"
            " with a load request"
        )
    for path in files:
        parts = _relative(path).split("/")
        if len(parts) > _MAX_PARTS or not all(map(_is_file_name, parts)):
            raise InvalidRequestError(
                f"the file path {_shown(path)} must be like '<version>/<name>', and lead to a file inside the model's"
                " folder"
            )


def write_files(files: Mapping[str, bytes]) -> LocalModel:
    """A private temporary folder with these files, which `close` removes. Blocks. Raises InvalidRequestError."""
    check_files(files)
    folder = Path(tempfile.mkdtemp(prefix="penstock-model-"))
    try:
        for path, data in files.items():
            _write(folder, path, data)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return LocalModel(folder, lambda: shutil.rmtree(folder, ignore_errors=True))


def _write(folder: Path, path: str, data: bytes) -> None:
    target = folder / _relative(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:  # the folder is ours alone and new: whatever is there, we have written
            file.write(data)
    except (FileExistsError, NotADirectoryError):
        raise InvalidRequestError(f"two of the files have conflicting paths: {_shown(path)}") from None


def _relative(path: str) -> str:
    return path.removeprefix("/")


def _is_file_name(part: str) -> bool:
    try:
        size = len(part.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= _MAX_COMPONENT_BYTES and part not in (".", "..") and part.isprintable() and "\\" not in part


def _shown(path: str) -> str:
    text = "".join(char if char.isprintable() else "?" for char in path[:_SHOWN_CHARS])
    return f"'{text}'" if len(path) <= _SHOWN_CHARS else f"'{text}…'"
