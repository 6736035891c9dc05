"""The files that a load request brings along (`file:<path>`): a model folder for as long as it is loaded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from penstock.classic.loading import BACKEND_FILENAME
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.repository.storage import LocalModel

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
