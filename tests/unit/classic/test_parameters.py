"""What the backends of this package do with options of `--backend-config`."""

from __future__ import annotations

import pytest

from penstock.classic.loading import find_backend


@pytest.mark.parametrize("name", ["dali", "fil", "onnxruntime", "openvino", "python", "pytorch", "tensorflow"])
def test_an_option_for_all_backends_is_no_mistake_and_an_unknown_one_is(name: str) -> None:
    found = find_backend(name)
    found({"default-max-batch-size": "8"})
    with pytest.raises(ValueError, match=f"the {name} backend has no option 'nothing'"):
        found({"nothing": "1"})
