"""Whether OpenVINO multiplies weights in 8 bits with activations in int8 here: a CPU without VNNI or AMX does not."""

from __future__ import annotations

import pytest

from penstock.engines.openvino.int8_kernels import rounds_activations

HAS_INT8 = rounds_activations("CPU", "f32")
ROUNDED = "int8" if HAS_INT8 else "f32"
"""Activations beside such weights where nothing else is asked for."""
needs_int8 = pytest.mark.skipif(not HAS_INT8, reason="this CPU does not multiply in int8")
