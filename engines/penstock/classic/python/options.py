"""The python backend's options: `--backend-config=python,<name>=<value>`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.classic.parameters import FOR_ALL_BACKENDS

_MIB = 1024 * 1024
_MAX_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class PythonOptions:
    shm_default_byte_size: int = _MIB
    """Bytes of shared memory that an instance starts with in each direction, when its first large tensor comes."""
    shm_growth_byte_size: int = _MIB
    """The least by which it grows."""
    shm_region_prefix_name: str = "penstock"
    """Shown as the memory's name in /proc/<pid>/maps."""
    stub_timeout_seconds: float = 30.0
    """For a process to start, before the model is imported; for `auto_complete_config`, without the imports; and for an
    orderly end."""
    backend_directory: Path | None = None
    """Where python-based backends are found, as `<name>/model.py`."""
    crash_folder: Path | None = None
    """Where it is kept what is known of a process that dies; None: nowhere."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> PythonOptions:
        """Raises ValueError for unknown names and values out of range."""
        found: dict[str, object] = {}
        for name, value in options.items():
            if name in ("shm-default-byte-size", "shm-growth-byte-size"):
                found[name.replace("-", "_")] = _number(name, value, 4096, _MAX_BYTES)
            elif name == "stub-timeout-seconds":
                found["stub_timeout_seconds"] = float(_number(name, value, 1, 86400))
            elif name == "shm-region-prefix-name":
                found["shm_region_prefix_name"] = _label(value)
            elif name == "backend-directory":
                found["backend_directory"] = Path(value)
            elif name == "crash-dir":
                found["crash_folder"] = Path(value)
            elif name not in FOR_ALL_BACKENDS:
                raise ValueError(f"the python backend has no option '{name[:64]}'")
        return cls(**found)  # type: ignore[arg-type]


def _number(name: str, value: str, low: int, high: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 16) or not low <= int(value) <= high:
        raise ValueError(f"the python backend's option '{name}' must be an integer from {low} to {high}")
    return int(value)


def _label(value: str) -> str:
    if not value.isprintable() or not 0 < len(value) <= 100:
        raise ValueError("the python backend's option 'shm-region-prefix-name' must be 1 to 100 printable characters")
    return value
