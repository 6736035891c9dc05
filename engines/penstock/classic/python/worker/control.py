"""load_model, unload_model, is_model_ready, get_model_dir."""

from __future__ import annotations

from collections.abc import Mapping

from . import host
from .wire import Packer

model_dir: list[str] = []
"""The folder of the version that this process runs."""


def get_model_dir() -> str:
    return model_dir[0] if model_dir else ""


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model. `files`: `file:<version>/<name>` to contents; they need a config.

    Raises TritonModelException when it cannot be loaded.
    """

    def pack(packer: Packer) -> list[object]:
        return [model_name, config, {name: packer.data(bytes(data)) for name, data in (files or {}).items()}]

    host.connected().ask("load", pack).result()


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    host.connected().ask("unload", lambda _: [model_name, unload_dependents]).result()


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """In this version; "": in any."""
    return bool(host.connected().ask("model_ready", lambda _: [model_name, model_version]).result().fields[0])
