"""LoRA adapters without weights: there, or not there, and different from one another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.engines.errors import InvalidRequestError, OverloadedError, UnsupportedError


class AdapterShelf:
    """Implements AdapterHost. What an adapter's weights would do to the tokens, its key does."""

    def __init__(self, max_loras: int, adapters: Mapping[str, str]) -> None:
        """`adapters`: key -> folder of those that are there from the start. Raises what `prepare_adapter` raises."""
        self._max_loras = max_loras
        self.adapters: set[str] = set()
        for key, folder in adapters.items():
            self.install_adapter(key, self.prepare_adapter(key, Path(folder)))

    def prepare_adapter(self, key: str, folder: Path) -> Path:
        if not self._max_loras:
            raise UnsupportedError("This engine was started without room for LoRA adapters.")
        if not (folder / "adapter_config.json").is_file():
            raise InvalidRequestError("The folder holds no adapter_config.json.")
        self._check_room(key)
        return folder

    def install_adapter(self, key: str, prepared: Path) -> None:
        self._check_room(key)
        self.adapters.add(key)

    def _check_room(self, key: str) -> None:
        if key not in self.adapters and len(self.adapters) >= self._max_loras:
            raise OverloadedError(f"There are {self._max_loras} LoRA adapters, the most that this engine has room for.")

    def unload_adapter(self, key: str) -> None:
        self.adapters.discard(key)
