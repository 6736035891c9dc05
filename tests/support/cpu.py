"""What this machine's CPU computes in, as tests need to know it."""

from __future__ import annotations

import pytest

from penstock.engines.host.cpu import this_cpu
from penstock.engines.openvino.numerics import cpu_facts
from penstock.engines.openvino.trials import Trial, run_trials

FACTS = cpu_facts(this_cpu())
needs_bf16 = pytest.mark.skipif("bf16" not in FACTS.dtypes, reason="this CPU does not compute in bf16")

HAS_INT8 = run_trials([Trial("rounding", "f32")]) == {"rounding f32": ""}
"""OpenVINO multiplies weights in 8 bits with activations in int8 here."""
ROUNDED = "int8" if HAS_INT8 else "f32"
"""Activations beside such weights in f32, where nothing else is set."""
needs_int8 = pytest.mark.skipif(not HAS_INT8, reason="this CPU does not multiply in int8")
