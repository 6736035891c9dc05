"""`convert_gguf.py TREE MODEL ...`: llama.cpp's converter, from its source TREE.

It recognises tokenizers by what they make of a text, and does not know ours, which splits as Qwen2's does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    tree = Path(sys.argv.pop(1)).resolve()
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    script = tree / "convert_hf_to_gguf.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
