"""load_model, unload_model, is_model_ready, get_model_dir."""

from __future__ import annotations

from collections.abc import Mapping

from . import host
from .arguments import flag, of_type, text
from .errors import TritonModelException
from .wire import Packer

model_dir: list[str] = []
"""The folder of the version that this process runs."""


def get_model_dir() -> str:
    return model_dir[0] if model_dir else ""


def load_model(
    model_name: str | bytes, config: str | bytes = "", files: Mapping[str | bytes, bytes] | None = None
) -> None:
    """Loads or reloads a model. `files`: `file:<version>/<name>` to contents; they need a config.

    Raises TritonModelException when it cannot be loaded.
    """
    name, override = text(model_name, "model_name"), text(config, "config")
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{name}', files should be a dictionary of file paths and file contents"
        )
    found = (
        {text(path, "a file's path"): of_type(data, bytes, "a file's content") for path, data in files.items()}
        if files
        else {}
    )

    def pack(packer: Packer) -> list[object]:
        return [name, override, {path: packer.data(data) for path, data in found.items()}]

    host.connected().ask("load", pack).result()


def unload_model(model_name: str | bytes, unload_dependents: bool = False) -> None:
    name, also = text(model_name, "model_name"), flag(unload_dependents, "unload_dependents")
    host.connected().ask("unload", lambda _: [name, also]).result()


def is_model_ready(model_name: str | bytes, model_version: str | bytes = "") -> bool:
    """In this version; "": in any."""
    name, version = text(model_name, "model_name"), text(model_version, "model_version")
    return bool(host.connected().ask("model_ready", lambda _: [name, version]).result().fields[0])
