"""The backends under tests/conformance/test_backend_conformance.py, each in a module of its own.

To put another backend under the suite, add a module with a `CANDIDATE` here and its name to BACKENDS.
"""

from __future__ import annotations

import importlib

from backend_candidates.candidate import Candidate

BACKENDS: dict[str, tuple[str, ...]] = {
    "identity": (),
    "onnxruntime": ("onnxruntime", "onnx"),
    "python": (),
}
"""The modules of this package, with the packages that each needs: without them its tests are skipped."""


def candidate(name: str) -> Candidate:
    found: Candidate = importlib.import_module(f"backend_candidates.{name}").CANDIDATE
    return found
