"""LoRA adapters without weights: there, or not there, and different from one another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.engines.errors import InvalidRequestError
from penstock.engines.kit.adapter_slots import AdapterSlots, load_configured


class AdapterShelf:
    """Implements AdapterHost. What an adapter's weights would do to the tokens, its key does."""

    def __init__(self, max_loras: int, adapters: Mapping[str, str]) -> None:
        """`adapters`: key -> folder of those that are there from the start. Raises what `prepare_adapter` raises."""
        self.adapters = AdapterSlots[Path](max_loras)
        load_configured(adapters, self.prepare_adapter, self.install_adapter)

    def prepare_adapter(self, key: str, folder: Path) -> Path:
        self.adapters.check_free(key)
        if not (folder / "adapter_config.json").is_file():
            raise InvalidRequestError("The folder holds no adapter_config.json.")
        return folder

    def install_adapter(self, key: str, prepared: Path) -> None:
        self.adapters.hold(key, prepared)

    def unload_adapter(self, key: str) -> None:
        self.adapters.held.pop(key, None)
