"""Copies of the demo model in several formats, whole and with one fault each, for `penstock verify`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file, save_file

from penstock.gateway.models.language.models import find_model
from support.gguf import write_gguf
from support.quantized import GROUP, Tensors, gptq, round_to_levels, write_quantized

DEMO = find_model(None).folder
ORDINARY_TOKEN = 5
"""#"""
LLAMA_TEMPLATE = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + "
    "'<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Of another family than the demo model's."""


def whole(folder: Path) -> Path:
    return Path(shutil.copytree(DEMO, folder))


def wrong_end_token(folder: Path) -> Path:
    """Every file that names the end token names one that is text."""
    whole(folder)
    _change(folder / "config.json", eos_token_id=ORDINARY_TOKEN)
    _change(folder / "generation_config.json", eos_token_id=ORDINARY_TOKEN)
    _change(folder / "tokenizer_config.json", eos_token="#")
    return folder


def wrong_special_token(folder: Path) -> Path:
    """Turns end with a token that the template does not end them with."""
    whole(folder)
    _change(folder / "config.json", eos_token_id=0)
    _change(folder / "generation_config.json", eos_token_id=0)
    _change(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    return folder


def wrong_template(folder: Path) -> Path:
    whole(folder)
    _change(folder / "tokenizer_config.json", chat_template=LLAMA_TEMPLATE)
    return folder


def swapped_tensors(folder: Path) -> Path:
    file = whole(folder) / "model.safetensors"
    weights = load_file(file)
    one, other = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    weights[one], weights[other] = weights[other].clone(), weights[one].clone()
    save_file(weights, file, {"format": "pt"})
    return folder


Fault = Callable[[Path], Path]
"""Makes a folder and returns it."""


def as_gguf(make: Fault, folder: Path, **metadata: Any) -> Path:
    """In Q8_0. A wrong end token has to be said in `metadata`, since the writer looks for the right one."""
    return write_gguf(make(folder), folder.with_suffix(".gguf"), lambda name: "Q8_0", **metadata)


def as_gptq(make: Fault, folder: Path) -> Path:
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    return write_quantized(make(folder), folder.with_name(f"{folder.name}-gptq"), config, _pack)


def _pack(name: str, matrix: npt.NDArray[np.float32]) -> tuple[Tensors, npt.NDArray[np.float32]]:
    levels = round_to_levels(matrix, 4, symmetric=True)
    return gptq(levels), levels.floats()


def _change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
