"""The files that a load request brings along (`file:<version>/<name>`): a model folder for as long as it is loaded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.repository.layout import check_version
from penstock.gateway.repository.storage import LocalModel

_MAX_COMPONENT_BYTES = 255
_MAX_DEPTH = 8
_MAX_FILES = 10_000
_SHOWN_CHARS = 64


def check_files(files: Mapping[str, bytes]) -> None:
    """Refuses paths that are not `<version>/<name>`, possibly with folders between, inside the model's folder.

    Raises InvalidRequestError.
    """
    if len(files) > _MAX_FILES:
        raise InvalidRequestError(f"more than {_MAX_FILES} files in one load request")
    for path in files:
        version, *rest = path.split("/")
        if not rest or len(rest) > _MAX_DEPTH or not all(map(_is_file_name, rest)):
            raise _bad_path(path)
        try:
            check_version(version)
        except InvalidRequestError:
            raise _bad_path(path) from None


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
    target = folder / path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:  # the folder is ours alone and new: whatever is there, we have written
            file.write(data)
    except (FileExistsError, NotADirectoryError):
        raise InvalidRequestError(f"two of the files have conflicting paths: {_shown(path)}") from None


def _is_file_name(part: str) -> bool:
    try:
        size = len(part.encode())
    except UnicodeEncodeError:
        return False
    return 0 < size <= _MAX_COMPONENT_BYTES and part not in (".", "..") and part.isprintable() and "\\" not in part


def _bad_path(path: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the file path {_shown(path)} must be '<version>/<name>', relative and inside the model's folder"
    )


def _shown(path: str) -> str:
    text = "".join(char if char.isprintable() else "?" for char in path[:_SHOWN_CHARS])
    return f"'{text}'" if len(path) <= _SHOWN_CHARS else f"'{text}…'"
