"""Files of a model: those that its configuration names, all that there are, and its Python files as modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError

_LONGEST_PATH, _LONGEST_NAME = 1024, 255
"""Characters, and bytes: file systems raise errors of their own for longer ones."""

MAX_LINKED_FILES = 10_000
"""Files that `files_below` gives through links."""


class TooManyFilesError(Exception):
    """There are more than MAX_LINKED_FILES behind the links of a model."""


def files_below(places: Iterable[Path]) -> Iterator[Path]:
    """These files, and all files of these folders, also through links, in a fixed order, each real folder once.
    `__pycache__` is left out. Raises TooManyFilesError."""
    seen: set[tuple[int, int]] = set()
    left = MAX_LINKED_FILES
    pending = [(place, False) for place in sorted(places, reverse=True)]
    while pending:
        place, is_linked = pending.pop()
        is_linked = is_linked or place.is_symlink()
        if place.is_dir():
            info = place.stat()
            if (info.st_dev, info.st_ino) not in seen and place.name != "__pycache__":
                seen.add((info.st_dev, info.st_ino))
                pending += [(path, is_linked) for path in sorted(place.iterdir(), reverse=True)]
        elif place.is_file():
            left -= is_linked
            if left < 0:
                raise TooManyFilesError
            yield place


def stays_inside(path: str) -> bool:
    """Whether a relative path leads below its folder and nowhere else. The links there are the repository's to judge,
    before it gives the folder away."""
    return not any(part in ("", ".", "..") for part in path.split("/")) and path.isprintable()


def check_file_name(field: str, path: str) -> None:
    """A path that a configuration names must stay in its folder. Raises InvalidRequestError."""
    parts = path.split("/")
    is_too_long = len(path) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in parts)
    if is_too_long or not stays_inside(path):
        raise InvalidRequestError(f"{field} must be a relative path inside the model's folder", param=field)


def model_path(config: ModelConfig, version_folder: Path, *defaults: str) -> Path:
    """The file or folder `default_model_filename`, or the first of `defaults` that is there.

    Raises ValueError when there is none, or when its name leads out of the version's folder.
    """
    names = [config.default_model_filename] if config.default_model_filename else defaults
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"default_model_filename '{name}' leads out of the model's folder")
        if (version_folder / name).exists():
            return version_folder / name
    raise not_found(config, version_folder, version_folder / names[0])


def not_found(config: ModelConfig, version_folder: Path, path: Path) -> ValueError:
    """For a file that a model's folder lacks, or that is none."""
    where = path.relative_to(version_folder.parent).as_posix()
    return ValueError(f"unable to find '{where}' for model '{config.name}'")


def run_file(path: Path, name: str) -> ModuleType:
    """A Python file of a repository as a module of this name, which stays in sys.modules, where dataclasses and
    pickling look for it. Each call runs the file again. Raises whatever the file raises."""
    loader = _Uncached(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


class _Uncached(SourceFileLoader):
    """Leaves no compiled file in the repository, and reads none: it would be out of date when a file changes twice in a
    second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code
