"""What this machine's CPU computes in, as tests need to know it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from penstock.engines.host.cpu import this_cpu
from penstock.engines.host.user_cache import user_cache
from penstock.engines.openvino.numerics import cpu_facts
from penstock.engines.openvino.trials import Trial, _Memory

FACTS = cpu_facts(this_cpu())
needs_bf16 = pytest.mark.skipif("bf16" not in FACTS.dtypes, reason="this CPU does not compute in bf16")

_trials = _Memory(this_cpu())
_trials.learn([Trial("rounding", "f32")])
HAS_INT8 = _trials.results.get("rounding f32") == ""
"""OpenVINO multiplies weights in 8 bits with activations in int8 here."""
ROUNDED = "int8" if HAS_INT8 else "f32"
"""Activations beside such weights in f32, where nothing else is set."""
needs_int8 = pytest.mark.skipif(not HAS_INT8, reason="this CPU does not multiply in int8")


def own_cache(folder: Path) -> str:
    """For XDG_CACHE_HOME: a user's cache that is empty, but for what trials have shown on this machine. Each process
    that does not find it there starts one that tries, which takes half a second."""
    known = user_cache("trials")
    with suppress(OSError):
        known.mkdir(parents=True, exist_ok=True)
    (folder / "penstock").mkdir(parents=True)
    (folder / "penstock" / "trials").symlink_to(known)
    return str(folder)
