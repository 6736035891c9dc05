"""The page of architectures: each causal language model of the installed transformers, and what serves it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.engines.formats.gguf.architectures import hugging_face_names
from penstock.engines.formats.model_settings import TEXT_PARTS
from penstock.engines.openvino import families  # noqa: F401  they register themselves
from penstock.engines.openvino.families_refused import REFUSED_FAMILIES
from penstock.engines.openvino.family import FAMILIES
from penstock.engines.openvino.image_encoder import VISION_MODELS
from penstock.loadtest.errors import LoadTestError

ROOT = Path(__file__).parents[3]
PAGE = "docs/architectures.md"
DATA = Path(__file__).with_name("architectures.toml")
_YES, _IMAGES, _TEXT = "yes", "yes, with images", "text only"
_HEAD = """# Architectures

Each causal language model of transformers {version}, by the name that `architectures` in its `config.json` has, and
the engines that serve it. This page is generated: `python loadtest/benchmarks architectures`.

- **OpenVINO** serves families that Penstock has a graph for. Each gives the tokens of transformers in f32 on random
  weights (`test_openvino_families.py`); [engines.md](engines.md#families-on-openvino) says what is special about some
  of them. All others are refused at the start, with the reason that is here.
- **GGUF**: files of llama.cpp for this architecture are read, too.
- **torch** serves models of transformers whose attention can be replaced. What is here was tried on a tiny model with
  random weights; the engine tries the same with each model that it loads.
- **vLLM** has a [list of its own](https://docs.vllm.ai/en/latest/models/supported_models.html), by its version;
  hybrids run under vLLM's scheduler only.

{served} architectures are served on OpenVINO, {torch} on torch, {any} of {all} on one or the other.

| architecture | model types | OpenVINO | GGUF | torch |
|---|---|---|---|---|
"""


class TorchVerdicts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transformers: str
    """The version that has been tried."""
    verdicts: dict[str, str]
    """By architecture: "yes", or why not."""


def main(settings: Mapping[str, Any]) -> int:
    """Exit status 1: with `check`, the page is not what the code says."""
    if settings["probe"]:
        _write_verdicts()
    page = render(read())
    is_current = (ROOT / PAGE).is_file() and (ROOT / PAGE).read_text(encoding="utf-8") == page
    if settings["check"]:
        if not is_current:
            print(f"{PAGE} is not what the code says: python loadtest/benchmarks architectures")
        return 0 if is_current else 1
    (ROOT / PAGE).write_text(page, encoding="utf-8")
    return 0


def read() -> TorchVerdicts:
    """Raises LoadTestError."""
    try:
        return msgspec.convert(tomllib.loads(DATA.read_text(encoding="utf-8")), TorchVerdicts)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise LoadTestError(f"{DATA}: {error}") from None


def model_types() -> dict[str, list[str]]:
    """Of each architecture, in the order of its name."""
    types: dict[str, list[str]] = {}
    for kind, architecture in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        types.setdefault(str(architecture), []).append(str(kind))
    return dict(sorted(types.items(), key=lambda item: item[0].lower()))


def on_openvino(architecture: str) -> str:
    """ "yes", or why not."""
    if architecture in FAMILIES:
        return _YES
    if any(architecture in model.architectures for model in VISION_MODELS):
        return _IMAGES
    return _TEXT if architecture in TEXT_PARTS else REFUSED_FAMILIES.get(architecture, "there is no family for it")


def render(verdicts: TorchVerdicts) -> str:
    rows = [_row(name, types, verdicts) for name, types in model_types().items()]
    served = [row[2] in (_YES, _IMAGES, _TEXT) for row in rows]
    by_torch = [row[4] == _YES for row in rows]
    either = [one or other for one, other in zip(served, by_torch, strict=True)]
    head = _HEAD.format(
        version=verdicts.transformers, served=sum(served), torch=sum(by_torch), any=sum(either), all=len(rows)
    )
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str, types: list[str], verdicts: TorchVerdicts) -> tuple[str, ...]:
    in_gguf = name in hugging_face_names()
    kinds = ", ".join(f"`{kind}`" for kind in types)
    torch = verdicts.verdicts.get(name, "not tried")
    return f"`{name}`", kinds, on_openvino(name), _YES if in_gguf else "", torch


def _write_verdicts() -> None:
    from benchmarks.architectures.torch_probe import verdict

    lines = [f"transformers = {json.dumps(transformers.__version__)}", "", "[verdicts]"]
    for name, types in model_types().items():
        lines.append(f"{name} = {json.dumps(verdict(name, types))}")
        print(lines[-1], flush=True)
    DATA.write_text("\n".join(lines) + "\n", encoding="utf-8")
