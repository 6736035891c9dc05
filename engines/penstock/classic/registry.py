"""Backends by name, from the entry-point group `penstock.backends`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from penstock.classic.base import Backend

GROUP = "penstock.backends"


def backend_names() -> list[str]:
    """What `find_backend` knows, sorted; nothing is imported."""
    return sorted(_entries())


def find_backend(name: str) -> type[Backend]:
    """The backend of this name; only its own module is imported.

    Raises ValueError for an unknown name, with the known ones, and for a plugin that cannot be imported or is none.
    """
    entry = _entries().get(name)
    if entry is None:
        raise ValueError(f"no backend is called '{name}'; there are {', '.join(backend_names()) or 'none'}")
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the backend '{name}' cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ValueError(f"the entry point '{name}' of {GROUP} is not a Backend")
    return found


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
