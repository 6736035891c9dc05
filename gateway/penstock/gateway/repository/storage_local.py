"""A repository in a local folder."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from penstock.engines.errors import EngineError, ModelNotFoundError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.repository.layout import ModelFileError
from penstock.gateway.repository.links import LinkRule, Links, Place, RefusedLinkError

logger = logging.getLogger(__name__)

_NOT_CONTENT = frozenset({"__pycache__"})
"""What running a model writes into its folder: no reason to load it again."""
MAX_WATCHED = 10_000
"""Files and folders of a model that its fingerprint tells of: polls look at them again and again."""
MAX_LINKED = 10_000
"""Files and folders that are looked at where a model's links have led out of the repository."""
_NEAREST = 100
"""Files and folders that are looked at before a configuration is read, when the model is not loaded."""


@dataclass(frozen=True, slots=True)
class _Folder:
    shown: str
    """Its path below the repository, through links."""
    real: str
    is_outside: bool
    """Links have led out of the repository."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A file, or a link."""

    shown: str
    """Its path below the repository, through links."""
    path: str
    """In its real folder."""
    place: Place | RefusedLinkError


class LocalStorage:
    """Models are the folders below `root`; `rule` says which links in them are followed."""

    def __init__(self, root: Path, rule: LinkRule = "trusted") -> None:
        self.root = root
        self._rule = rule
        try:
            mode = os.stat(self._real_root()).st_mode
        except OSError as error:
            raise ConfigError(f"the model repository {root} cannot be read: {error.strerror}") from None
        except RefusedLinkError as error:
            raise ConfigError(f"the model repository {root} {error}") from None
        if not stat.S_ISDIR(mode):
            raise ConfigError(f"the model repository {root} is not a folder")
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            logger.warning("the model repository %s can be changed by all users, and models are code", root)

    def names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.name for entry in entries if _is_folder(entry))
        except OSError as error:
            raise EngineError(f"the model repository {self.root} cannot be read: {error.strerror}") from None

    def fingerprint(self, name: str) -> str:
        """A link that is refused counts with the reason, so that its model is tried again when that has changed."""
        total = 0
        for found in self._walk(name, MAX_WATCHED):
            line = hashlib.sha256(f"{found.path}\0{_state(found.place)}".encode(errors="replace"))
            total += int.from_bytes(line.digest())  # whatever the order in which folders are listed
        return f"{total:x}"

    def fetch(self, name: str) -> Path:
        """The folder itself, when no link in it is refused."""
        for found in self._walk(name):
            if isinstance(refusal := found.place, RefusedLinkError):
                what = f"{found.shown} of model '{name}'"
                raise ModelFileError(f"{what} {refusal}", f"{what} {refusal.public}")
        return self.root / name

    def readable_folder(self, name: str) -> Path | None:
        """The folder, to look at its configuration; None where a link there is refused, or nothing can be read."""
        try:
            is_refused = any(isinstance(found.place, RefusedLinkError) for found in self._walk(name, _NEAREST))
        except (EngineError, ModelNotFoundError):
            return None
        return None if is_refused else self.root / name

    def _walk(self, name: str, most: int = sys.maxsize) -> Iterator[_Found]:
        """The model's files, through links, and these links: each real folder once, the nearest to the model's first.

        It ends after `most` files and folders, and outside the repository after MAX_LINKED.
        """
        root = self._current_root()
        links = Links(root, self._rule)
        try:
            pending = deque([_model_folder(links, root, name)])
        except RefusedLinkError as refusal:
            yield _Found(name, os.path.join(root, name), refusal)
            return
        seen: set[str] = set()
        most_linked = MAX_LINKED
        while pending and most > 0:
            folder = pending.popleft()
            if folder.real in seen:
                continue
            seen.add(folder.real)
            looked = 0
            for entry in islice(_listed(folder, name), min(most, most_linked) if folder.is_outside else most):
                looked += 1
                shown, path = f"{folder.shown}/{entry.name}", os.path.join(folder.real, entry.name)
                place = _place(links, folder, entry)
                if isinstance(place, Place) and place.is_folder:
                    pending.append(_Folder(shown, place.real, place.is_outside))
                    if place.real == path:
                        continue
                if place is not None:
                    yield _Found(shown, path, place)
            most -= looked
            most_linked -= looked if folder.is_outside else 0

    def _current_root(self) -> str:
        """Looked for each time: a repository may be a link that is changed when all its models are."""
        try:
            return self._real_root()
        except OSError as error:
            raise EngineError(f"the model repository {self.root} cannot be read: {error.strerror}") from None
        except RefusedLinkError as error:
            raise EngineError(f"the model repository {self.root} {error}") from None

    def _real_root(self) -> str:
        """The folder's path without links. Raises OSError, RefusedLinkError."""
        real = os.path.realpath(self.root)
        if os.path.exists(real) and os.path.samefile(real, self.root):
            return real
        return Links("/", self._rule).resolve(str(self.root.absolute()))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself, or where the server may not look
        return False


def _model_folder(links: Links, root: str, name: str) -> _Folder:
    path = os.path.join(root, name)
    place = links.follow(root, name) if os.path.islink(path) else Place(path, os.path.isdir(path), is_outside=False)
    if place is None or not place.is_folder:
        raise ModelNotFoundError(f"failed to find model '{name}' in the model repository")
    return _Folder(name, place.real, place.is_outside)


def _place(links: Links, folder: _Folder, entry: os.DirEntry[str]) -> Place | RefusedLinkError | None:
    """None for a link to nothing, and for what has gone."""
    real = os.path.join(folder.real, entry.name)
    try:
        if entry.is_symlink():
            return links.follow(folder.real, entry.name)
        if folder.is_outside:
            return links.child(real, entry.stat(follow_symlinks=False))
    except RefusedLinkError as refusal:
        return refusal
    except FileNotFoundError:
        return None
    return Place(real, entry.is_dir(follow_symlinks=False), is_outside=False)


def _state(place: Place | RefusedLinkError) -> str:
    """Another text when the file, or where the link leads, is another."""
    if isinstance(place, RefusedLinkError):
        return str(place)
    try:
        info = os.stat(place.real, follow_symlinks=False)
    except FileNotFoundError:  # gone since it was listed
        return ""
    times = "" if place.is_folder else f"{info.st_size}\0{info.st_mtime_ns}\0{info.st_ino}"
    return f"{place.real}\0{times}"


def _listed(folder: _Folder, name: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder.real) as entries:
            yield from (entry for entry in entries if entry.name not in _NOT_CONTENT)
    except FileNotFoundError:
        return
    except OSError as error:
        if not folder.is_outside:  # there may be more than the model needs
            raise EngineError(f"the folder of model '{name}' cannot be read: {error.strerror}") from None
