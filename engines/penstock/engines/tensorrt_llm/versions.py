"""Which TensorRT-LLM is installed, and whether this engine was made for it. Imports nothing of TensorRT-LLM.

Written against the public sources of NVIDIA/TensorRT-LLM on the way to 1.2 (1.2.0rc2 and revisions up to early 2026):
llmapi/llm.py, llmapi/llm_args.py, executor/{executor,proxy,base_worker,result,request}.py, sampling_params.py,
lora_helper.py and the PyTorch backend's py_executor.py and sampler.py; the released wheels were not at hand. `contract`
holds what is used of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata

from penstock.engines.errors import EngineError

OLDEST = (1, 2)
TOO_NEW = (1, 3)
"""1.3 has other samplers and other defaults: it is let in when it has been looked at."""

DISTRIBUTION = "tensorrt-llm"

_RELEASE = re.compile(r"(\d+)\.(\d+)")


def installed_version(version_of: Callable[[str], str] = metadata.version) -> str:
    """Such as "1.2.1". Raises EngineError when it is not installed, or not one that this engine knows."""
    try:
        version = version_of(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise EngineError("TensorRT-LLM is not installed: pip install 'penstock-server[tensorrt-llm]'") from None
    match = _RELEASE.match(version)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) < TOO_NEW:
        raise EngineError(
            f"{DISTRIBUTION} {version} is installed, but this engine needs {_text(OLDEST)} or newer and older than "
            f"{_text(TOO_NEW)}: pip install '{DISTRIBUTION}>={_text(OLDEST)},<{_text(TOO_NEW)}'"
        )
    return version


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
