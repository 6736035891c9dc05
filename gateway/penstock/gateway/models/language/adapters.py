"""LoRA adapters under their public names. Engines know keys only, one for each time that an adapter is loaded."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.engines.errors import InvalidRequestError, NotFoundError, UnsupportedError
from penstock.gateway.configuration.config import ConfigError


class CallCounter:
    """Counts the calls that a model or an adapter serves."""

    def __init__(self) -> None:
        self._calls = 0
        self._holds = 0
        self._idle = asyncio.Event()
        self.idle_since = time.monotonic()
        """When the newest call ended, here or in a process that held it."""

    @property
    def calls(self) -> int:
        return self._calls

    def begin(self) -> None:
        """A call is being served."""
        self._calls += 1
        self._idle.clear()

    def end(self) -> None:
        self._calls -= 1
        if not self._calls:
            self.idle_since = time.monotonic()
            self._look()

    def hold(self) -> None:
        """Another process may serve calls: it tells when it no longer does."""
        self._holds += 1
        self._idle.clear()

    @property
    def held(self) -> bool:
        return self._holds > 0

    def release(self) -> None:
        self._holds -= 1
        self.idle_since = time.monotonic()
        self._look()

    def _look(self) -> None:
        if not self._calls and not self._holds:
            self._idle.set()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exc: object) -> None:
        self.end()

    async def wait_idle(self) -> None:
        """Returns when no call is being served, here or in a process that holds it."""
        if self._calls or self._holds:
            await self._idle.wait()


_CONFIG_FILE = "adapter_config.json"
"""PEFT's; a folder without it is no adapter."""
_MAX_NAME = 256
_numbers = itertools.count(1)
"""Of all loads in this process, so that no key comes twice: keys divide the prefix cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One that has been loaded, or will be with its model. Loaded again, it is another one."""

    name: str
    key: str
    """What the engine knows it by (`AdapterHost`)."""
    folder: Path
    created: int
    """Unix seconds."""
    in_flight: CallCounter = field(default_factory=CallCounter)

    @property
    def root(self) -> str:
        """The folder's name: shown in /v1/models, so never a path."""
        return self.folder.name


def new_adapter(name: str, folder: Path) -> Adapter:
    return Adapter(name, f"{name}:{next(_numbers)}", folder, int(time.time()))


class AdapterSet:
    """The adapters of one model, by name."""

    def __init__(
        self, loaded: Iterable[Adapter] = (), *, directory: Path | None = None, max_loaded: int | None = None
    ) -> None:
        self._loaded = {adapter.name: adapter for adapter in loaded}
        self.directory = directory
        """Adapters below it may be loaded and unloaded at run time; None: not at all."""
        self.max_loaded = len(self._loaded) if max_loaded is None else max_loaded
        """What the engine has room for; 0: the model runs without LoRA."""
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._loaded)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._loaded.values())

    def get(self, name: str) -> Adapter | None:
        return self._loaded.get(name)

    def named(self, name: str) -> Adapter:
        """Raises UnsupportedError and InvalidRequestError in the words of Triton's vLLM backend (src/model.py)."""
        if not self.max_loaded:
            raise UnsupportedError("LoRA feature is not enabled.", param="lora_name")
        adapter = self._loaded.get(name)
        if adapter is None:
            known = f"we currently support {list(self._loaded)}"
            raise InvalidRequestError(f"LoRA {name[:64]} is not supported, {known}", param="lora_name")
        return adapter

    def put(self, adapter: Adapter) -> Adapter | None:
        """The name means this one from now on. Returns the one that it meant before."""
        before = self._loaded.get(adapter.name)
        self._loaded[adapter.name] = adapter
        self.on_change()
        return before

    def remove(self, adapter: Adapter) -> None:
        del self._loaded[adapter.name]
        self.on_change()

    def follow(self, keys: Collection[str], max_loaded: int) -> None:
        """The adapters are those of an engine that another server has started, which knows them by these keys."""
        self.max_loaded = max_loaded
        for adapter in list(self):
            if adapter.key not in keys:
                self.remove(adapter)
        known = {adapter.key for adapter in self}
        for key in keys:
            if key not in known:
                name = key.rpartition(":")[0]
                self.put(Adapter(name, key, Path(name), int(time.time())))


def parse_adapters(texts: Sequence[str], models: Collection[str]) -> dict[str, Path]:
    """The setting `lora`, NAME=FOLDER each, as name -> folder. `models`: names that are taken. Raises ConfigError."""
    folders: dict[str, Path] = {}
    for text in texts:
        name, equals, path = (part.strip() for part in text.partition("="))
        if not equals or not name or not path:
            raise ConfigError(f"lora: {text!r} is not NAME=FOLDER")
        if not _is_name(name):
            raise ConfigError(f"lora: {name[:_MAX_NAME]!r} is not a name: at most {_MAX_NAME} printable characters")
        if name in folders or name in models:
            raise ConfigError(f"lora: the name {name!r} is given twice" + " (it is a model's)" * (name in models))
        folders[name] = Path(path).expanduser().resolve()
        if not (folders[name] / _CONFIG_FILE).is_file():
            raise ConfigError(f"lora: {path} is not a folder with a LoRA adapter: it has no {_CONFIG_FILE}")
    return folders


def parse_directory(text: str | None) -> Path | None:
    """The setting `lora_directory`. Raises ConfigError."""
    if text is None:
        return None
    directory = Path(text).expanduser().resolve()
    if not directory.is_dir():
        raise ConfigError(f"lora-directory: {text} is not a folder")
    return directory


def check_name(name: str) -> None:
    """Raises InvalidRequestError for what cannot be an adapter's name. Slashes can: model names have them, too."""
    if not _is_name(name):
        message = f"lora_name must have 1 to {_MAX_NAME} printable characters, without spaces at its ends."
        raise InvalidRequestError(message, param="lora_name")


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _MAX_NAME and name.isprintable() and name == name.strip()


def find_folder(directory: Path, path: str) -> Path:
    """The adapter's folder below `directory` that a client means by `path`, relative to it or absolute.

    Where a path leads is decided before anything tells whether it exists, and links do not lead out: neither the folder
    nor a file in it. Messages name no paths. Raises InvalidRequestError, NotFoundError. Reads the file system.
    """
    root = os.path.realpath(directory)
    folder = _below(root, os.path.join(root, path))
    try:
        entries = os.listdir(folder)
    except OSError:
        entries = []
    if _CONFIG_FILE not in entries:
        raise NotFoundError(f"There is no LoRA adapter there: no folder with {_CONFIG_FILE}.", param="lora_path")
    for entry in entries:
        _below(root, os.path.join(folder, entry))
    return Path(folder)


def _below(root: str, path: str) -> str:
    """`path` with its links resolved. Raises InvalidRequestError when that is not below `root`."""
    try:
        real = os.path.realpath(path)
        real.encode()
        inside = real != root and os.path.commonpath((root, real)) == root
    except ValueError:  # a NUL, or a name that is not Unicode
        inside = False
    if not inside:
        raise InvalidRequestError("lora_path must lie below the server's lora-directory.", param="lora_path")
    return real
