"""Folders as fine-tunes and converters leave them."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pytest

from support.models import edit_config, load_reference, make_model, reference_answers
from support.runner import Driver, prompt


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_by_other_names(shards: int, tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, shards=shards)
    wanted = reference_answers(load_reference(tmp_path), [prompt(20, 1)], 4, [[]])
    if shards == 1:
        (tmp_path / "model.safetensors").rename(tmp_path / "my-merge.safetensors")
        (tmp_path / "consolidated.safetensors").touch()
    else:
        (tmp_path / "model.safetensors.index.json").unlink()
    assert Driver(make_runner(tmp_path)).generate([prompt(20, 1)], 4) == wanted


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}])
def test_stretched_contexts(rope: dict[str, Any], tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, rope_parameters={**rope, "rope_theta": 1e4}, max_position_embeddings=64)
    edit_config(tmp_path, rope_scaling=rope, rope_theta=1e4, rope_parameters=None)
    runner = make_runner(tmp_path)
    assert runner.info.max_model_len == 512
    found = Driver(runner).generate([prompt(300, 1)], 8)
    assert found == reference_answers(load_reference(tmp_path), [prompt(300, 1)], 8, found)


def test_settings_with_byte_order_marks(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes(BOM_UTF8 + (tmp_path / name).read_bytes())
    assert make_runner(tmp_path).info.eos_token_ids == (2,)
