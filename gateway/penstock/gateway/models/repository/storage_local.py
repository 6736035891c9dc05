"""A repository in a local folder."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pwd
import re
import stat
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from penstock.engines.errors import EngineError, ModelNotFoundError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.repository.layout import ModelFileError

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
    place: ModelPlace | RefusedLinkError


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
        for entry in self._walk(name, MAX_WATCHED):
            line = hashlib.sha256(f"{entry.path}\0{_state(entry.place)}".encode(errors="replace"))
            total += int.from_bytes(line.digest())  # whatever the order in which folders are listed
        return f"{total:x}"

    def fetch(self, name: str) -> Path:
        """The folder itself, when no link in it is refused."""
        for entry in self._walk(name):
            if isinstance(refusal := entry.place, RefusedLinkError):
                what = f"{entry.shown} of model '{name}'"
                raise ModelFileError(f"{what} {refusal}", f"{what} {refusal.public}")
        return self.root / name

    def readable_folder(self, name: str) -> Path | None:
        """The folder, to look at its configuration; None where a link there is refused, or nothing can be read."""
        try:
            is_refused = any(isinstance(entry.place, RefusedLinkError) for entry in self._walk(name, _NEAREST))
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
                if isinstance(place, ModelPlace) and place.is_folder:
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
    place = (
        links.follow(root, name) if os.path.islink(path) else ModelPlace(path, os.path.isdir(path), is_outside=False)
    )
    if place is None or not place.is_folder:
        raise ModelNotFoundError(f"failed to find model '{name}' in the model repository")
    return _Folder(name, place.real, place.is_outside)


def _place(links: Links, folder: _Folder, entry: os.DirEntry[str]) -> ModelPlace | RefusedLinkError | None:
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
    return ModelPlace(real, entry.is_dir(follow_symlinks=False), is_outside=False)


def _state(place: ModelPlace | RefusedLinkError) -> str:
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


# Symbolic links of a local repository: where they lead, and whether others could change what is there.
#
# The rule is that of sshd for the files that it trusts (`StrictModes`): each folder on the way, and what the link
# leads to, belongs to root or to the server's user, and neither its group nor all users can write to it. Then no
# other user can replace the file, before it is checked or between the check and its use.

LinkRule = Literal["trusted", "inside", "modelcar"]

_CAR = re.compile(r"/proc/[0-9]+/root")
"""The root folder of another process, which may have mounts of its own. The kernel goes there by itself: as a text
(readlink) it is `/`, which would be the server's own root folder."""
_MOST_LINKS = 40
"""One after the other, as in Linux (path_resolution(7))."""
_MOST_STEPS = 1000
_LEADS_OUT = "is a link that leads out of the model repository"
_NOT_FOLLOWED = "is a link that is not followed: the place is not trusted"
_BEHIND = "lies behind a link and is not taken: the place is not trusted"
_TO_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


class RefusedLinkError(Exception):
    """Its text goes behind what is refused: the whole reason, with paths of this machine. `public` has none of them."""

    def __init__(self, text: str, public: str) -> None:
        super().__init__(text)
        self.public = public


@dataclass(frozen=True, slots=True)
class ModelPlace:
    real: str
    """Its path without any link in it."""
    is_folder: bool
    is_outside: bool
    """Not in the repository."""


@dataclass(slots=True)
class _Way:
    at: str
    """The real folder or file that it has come to."""
    links: list[str] = field(default_factory=list)
    """Those that it goes through."""
    left: list[str] = field(default_factory=list)
    """Folders that it leaves by `..`."""


class Links:
    """Judges the links of one walk through a repository, and remembers the folders that it has seen."""

    def __init__(self, root: str, rule: LinkRule) -> None:
        """`root`: the repository's real folder."""
        self._root = root
        self._rule = rule
        self._owners = {0, os.geteuid()}
        self._faults: dict[str, str] = {}
        """By folder: what is wrong with it or with one above it."""
        self._targets: dict[str, str | None] = {}
        """Of what stands in the middle of paths; None: a folder."""

    def follow(self, folder: str, name: str) -> ModelPlace | None:
        """Where the link `name` in the real folder `folder` leads; None: to nothing, and others cannot change that.
        Raises RefusedLinkError."""
        way, path = _Way(folder), os.path.join(folder, name)
        try:
            self._go(way, name)
            is_there = True
        except OSError as error:
            if error.errno not in _TO_NOTHING or os.path.exists(path):
                raise _refused("", f"it cannot be read: {error.strerror}") from None
            is_there = False
        is_outside = not self._is_inside(way.at)
        if is_outside and self._rule == "inside":
            raise RefusedLinkError(_LEADS_OUT, _LEADS_OUT)
        try:
            info = _info(way.at)
            fault = self._fault(way, info) if self._rule != "inside" else ""
            if is_there and not os.path.samestat(info, os.stat(path)):
                fault = "it has just been changed"
        except OSError as error:
            fault = f"it cannot be read: {error.strerror}"
        if fault:
            raise _refused(way.at, fault)
        return ModelPlace(way.at, stat.S_ISDIR(info.st_mode), is_outside) if is_there else None

    def child(self, real: str, info: os.stat_result) -> ModelPlace:
        """What lies in a folder outside the repository, and is no link. Raises RefusedLinkError."""
        is_outside = not self._is_inside(real)
        if is_outside and (fault := self._end_fault(real, info)):
            raise RefusedLinkError(f"lies behind a link, at {real}, and is not taken: {fault}", _BEHIND)
        return ModelPlace(real, stat.S_ISDIR(info.st_mode), is_outside)

    def resolve(self, path: str) -> str:
        """The absolute path without links. Raises OSError, RefusedLinkError for the way through another process's
        files, unless model cars are allowed."""
        way = _Way("/")
        self._go(way, path)
        return way.at

    def _go(self, way: _Way, path: str) -> None:
        """Step by step as the kernel goes. Where OSError is raised, `way` is what there is of it."""
        rest = _parts(path)
        for _ in range(_MOST_STEPS):
            if not rest:
                return
            name = rest.pop()
            if name == "..":
                way.left.append(way.at)
                way.at = way.at if _CAR.fullmatch(way.at) else os.path.dirname(way.at)
                continue
            if way.at == "/proc":
                way.at = self._car(name, rest)
                continue
            here = f"{way.at.rstrip('/')}/{name}"  # os.path.join takes twice as long
            target = self._target(here, is_last=not rest)
            if target is None:
                way.at = here
                continue
            way.links.append(here)
            if len(way.links) > _MOST_LINKS:
                break
            way.at = "/" if target.startswith("/") else way.at
            rest += _parts(target)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _target(self, path: str, *, is_last: bool) -> str | None:
        if path in self._targets:
            return self._targets[path]
        try:
            target = os.readlink(path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            target = None
        if not is_last:  # files are many, and each is looked at once
            self._targets[path] = target
        return target

    def _car(self, process: str, rest: list[str]) -> str:
        root = f"/proc/{process}/{rest.pop() if rest else ''}"
        if not _CAR.fullmatch(root):
            raise _refused("", "it leads into /proc")
        if self._rule != "modelcar":
            raise _refused("", "it leads to the files of another process, which needs --repository-links modelcar")
        return root

    # Trust

    def _fault(self, way: _Way, info: os.stat_result) -> str:
        """Why the way, or its end, is not to be trusted; empty if it is."""
        real, is_inside = way.at, self._is_inside(way.at)
        for folder in way.left:
            if not (self._is_inside(folder) or self._is_above(folder)) and (fault := self._folder_fault(folder)):
                return fault
        for link in way.links:
            if fault := self._link_fault(link, is_inside):
                return fault
        if is_inside:
            return ""
        if not stat.S_ISDIR(info.st_mode) and not stat.S_ISREG(info.st_mode):
            return f"{real} is neither a folder nor a file"
        return self._folder_fault(os.path.dirname(real)) or self._end_fault(real, info)

    def _link_fault(self, link: str, leads_inside: bool) -> str:
        """Its folder decides who can replace it. In the repository it may belong to the owner of its folder, who could
        replace all else that is there."""
        folder, owner = os.path.dirname(link), os.lstat(link).st_uid
        owners = self._owners
        if self._is_inside(folder):
            owners = {*owners, owner if leads_inside else os.stat(folder).st_uid}
        elif leads_inside and self._is_above(folder):  # who can change that folder can replace the repository
            return ""
        elif fault := self._folder_fault(folder):
            return fault
        return "" if owner in owners else self._owner_fault(link, owner)

    def _folder_fault(self, folder: str) -> str:
        """Of the folder and of those above it."""
        if folder not in self._faults:
            fault = ""
            for path in _downwards(folder):
                fault = fault or self._faults.get(path) or self._own_fault(path, _info(path), is_on_the_way=True)
                self._faults[path] = fault
        return self._faults[folder]

    def _end_fault(self, real: str, info: os.stat_result) -> str:
        return "it leads into /proc" if real == "/proc" else self._own_fault(real, info)

    def _own_fault(self, path: str, info: os.stat_result, *, is_on_the_way: bool = False) -> str:
        """A folder like /tmp, where only owners can replace what there is, may be on the way."""
        if info.st_uid not in self._owners:
            return self._owner_fault(path, info.st_uid)
        writers = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not writers or (is_on_the_way and info.st_mode & stat.S_ISVTX):
            return ""
        who = "all users" if writers & stat.S_IWOTH else "its group"
        return f"{path} can be changed by {who}: chmod go-w {path}"

    def _owner_fault(self, path: str, owner: int) -> str:
        trusted = " or ".join(sorted(map(_user, self._owners)))
        return f"{path} belongs to {_user(owner)} and not to {trusted}: chown it, or copy it into the repository"

    def _is_inside(self, real: str) -> bool:
        return real == self._root or real.startswith(self._root.rstrip("/") + "/")

    def _is_above(self, folder: str) -> bool:
        return self._root.startswith(folder.rstrip("/") + "/")


def _refused(real: str, fault: str) -> RefusedLinkError:
    leads = f"is a link to {real}" if real else "is a link"
    return RefusedLinkError(f"{leads} that is not followed: {fault}", _NOT_FOLLOWED)


def _info(real: str) -> os.stat_result:
    return os.stat(real, follow_symlinks=_CAR.fullmatch(real) is not None)


def _parts(path: str) -> list[str]:
    """The last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _downwards(folder: str) -> Iterator[str]:
    """`/`, and the folders from there down to `folder`."""
    yield "/"
    end = 0
    while end < len(folder) - 1:
        end = folder.find("/", end + 1)
        end = len(folder) if end < 0 else end
        yield folder[:end]


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
