"""The examples of the docs for models in a program run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["docs/offline.md", "README.md"])
def test_the_example(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    [code] = [code for code in blocks if "penstock import LLM" in code]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("the greatest common divisor", "a directory tree", "os.path."):
        assert words in done.stdout, "the demo model is asked for what it does not know"
