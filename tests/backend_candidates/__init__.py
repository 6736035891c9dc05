"""The backends under tests/conformance/test_backend_conformance.py, each in a module of its own.

To put another backend under the suite, add a module with a `CANDIDATE` here and its name to BACKENDS; `module.NAME` is
another candidate of the module.
"""

from __future__ import annotations

import importlib

from backend_candidates.candidate import Candidate

BACKENDS: dict[str, tuple[str, ...]] = {
    "backend_file": (),
    "dali": ("nvidia", "nvidia.dali"),
    "fil": ("xgboost",),
    "identity": (),
    "onnxruntime": ("onnxruntime", "onnx"),
    "openvino": ("openvino",),
    "openvino_paddle": ("openvino", "paddle"),
    "python": (),
    "pytorch": ("torch",),
    "tensorflow": ("tensorflow",),
    "tensorflow.THROUGH_OPENVINO": ("tensorflow",),
}
"""By name, with the packages that each needs: without them its tests are skipped."""

MORE: dict[str, tuple[str, ...]] = {
    "openvino.ONNX": ("openvino", "onnx"),
    "pytorch.EXPORTED": ("torch",),
}
"""Other formats of backends that are in the suite anyway: with PENSTOCK_ALL_BACKENDS=1 in the environment."""


def candidate(name: str) -> Candidate:
    module, _, variable = name.partition(".")
    found: Candidate = getattr(importlib.import_module(f"backend_candidates.{module}"), variable or "CANDIDATE")
    return found
