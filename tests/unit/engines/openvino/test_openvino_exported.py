"""Models that OpenVINO's tools exported: what the graph itself says, from a paged cache; and what is refused."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import openvino as ov
import openvino.opset15 as ops
import pytest

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.model_files import exported_graph
from penstock.engines.openvino.runner import _OLDEST
from support.cpu import needs_int8
from support.exported import exported_tokens, write_exported
from support.models import make_model
from support.runner import Driver, prompt

ROOT = Path(__file__).parents[4]
COUNT = 10
PROMPTS = [prompt(length, length) for length in (1, 70)]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("f32", "as exported,"),
        ("int8", "as exported (int8), activations f32,"),
        ("int4", "as exported (int4), activations f32,"),
    ],
)
def test_tokens_are_those_of_the_graph_itself(weights: str, words: str, tmp_path: Path, make_runner: Any) -> None:
    folder = write_exported(tmp_path, weights=weights)
    wanted = [exported_tokens(folder, tokens, COUNT) for tokens in PROMPTS]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted), "the model says the same whatever the prompt"
    runner = make_runner(folder, activations="auto" if weights == "f32" else "f32")
    assert words in runner.info.runner
    assert Driver(runner).generate(PROMPTS, COUNT) == wanted


@pytest.mark.parametrize("shape", [{"positions": "in threes"}, {"recurrent": True}])
def test_graphs_of_hybrids(shape: dict[str, Any], tmp_path: Path, make_runner: Any) -> None:
    """One that counts positions gets them from the step, in whose batches they differ; states of recurrent layers are
    in rows."""
    folder = write_exported(tmp_path, **shape)
    expected = [exported_tokens(folder, tokens, COUNT) for tokens in PROMPTS]
    runner = make_runner(folder)
    assert (runner.info.states is not None) == bool(shape.get("recurrent"))
    driver = Driver(runner)
    assert driver.generate(PROMPTS, COUNT) == expected
    request = driver.add(7, PROMPTS[1])
    for count in (33, 1, 36):
        driver.step({7: count})
    for _ in range(COUNT - 1):
        driver.step()
    assert request.output == expected[1]


def test_positions_that_the_graph_counts_are_refused(tmp_path: Path, make_runner: Any) -> None:
    folder = write_exported(tmp_path, positions="counted")
    with pytest.raises(UnsupportedError, match=r"counts positions from the length of its state, not from its input"):
        make_runner(folder)


def test_states_of_a_hybrid_have_one_type(tmp_path: Path, make_runner: Any) -> None:
    with pytest.raises(UnsupportedError, match="activations=mixed"):
        make_runner(write_exported(tmp_path, recurrent=True), activations="mixed")


@needs_int8
def test_activations_are_rounded_beside_integers(tmp_path: Path, make_runner: Any) -> None:
    runner = make_runner(write_exported(tmp_path, weights="int8"))
    assert "activations int8" in runner.info.runner
    assert runner.info.eos_token_ids == (2,)
    assert runner.info.max_model_len == 256


def test_blocks_that_were_kept_are_those_of_the_same_files(tmp_path: Path, make_runner: Any) -> None:
    folder = write_exported(tmp_path)
    first, same = (make_runner(folder).cache_identity() for _ in range(2))
    assert first == same
    os.utime(folder / "openvino_model.bin", (1, 1))
    assert make_runner(folder).cache_identity() != first


def test_weights_in_safetensors_come_first(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    (model / "openvino_model.xml").touch()
    assert exported_graph(model) is None


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({}, {"weights": "int8"}, "weights=int8: an exported model's weights stay as they are"),
        ({}, {"max_loras": 1}, "LoRA adapters are not supported with a model that OpenVINO's tools exported"),
        (
            {"sliding_window": 24},
            {},
            "sliding_window=24, which is not supported .* unless max_model_len is not above it",
        ),
        ({"sliding_window": "wide"}, {}, "sliding_window=wide"),
        ({"text_config": {}}, {}, "multimodal models are not supported"),
        ({"max_position_embeddings": None}, {}, "config.json has none of max_position_embeddings"),
    ],
)
def test_settings_that_the_graph_cannot_have_are_refused(
    config: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path, make_runner: Any
) -> None:
    folder = write_exported(tmp_path, **config)
    with pytest.raises(UnsupportedError, match=message):
        make_runner(folder, **settings)


@pytest.mark.parametrize("config", [{"sliding_window": 24, "use_sliding_window": False}, {"sliding_window": 64}])
def test_windows_that_change_nothing(config: dict[str, Any], tmp_path: Path, make_runner: Any) -> None:
    assert make_runner(write_exported(tmp_path, **config), max_model_len=64).info.max_model_len == 64


def test_draft_models_are_refused(tmp_path: Path, make_runner: Any) -> None:
    folder = write_exported(tmp_path / "exported")
    for draft in (folder, make_model(tmp_path / "draft")):
        with pytest.raises(UnsupportedError, match="model is one that OpenVINO's tools exported"):
            make_runner(folder, draft_model_dir=draft)


def without_state() -> ov.Model:
    ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    logits = ops.convert(ids, "f32")
    logits.output(0).set_names({"logits"})
    return ov.Model([ops.result(logits)], [ids], "x")


def test_other_graphs_are_refused(tmp_path: Path, make_runner: Any) -> None:
    folder = write_exported(tmp_path)
    ov.save_model(without_state(), folder / "openvino_model.xml")
    with pytest.raises(UnsupportedError, match=r"no language model with a state.*text-generation-with-past"):
        make_runner(folder)
    (folder / "openvino_model.xml").write_text("<net>")
    with pytest.raises(EngineError, match=r"openvino_model\.xml cannot be read"):
        make_runner(folder)


@pytest.mark.parametrize(
    ("operation", "opset"),
    [('type="Novel" version="opset99"', "opset99"), ('type="Novel" version="opset13"', "opset13")],
)
def test_operations_of_other_releases_are_named(operation: str, opset: str, tmp_path: Path, make_runner: Any) -> None:
    folder = write_exported(tmp_path)
    graph = folder / "openvino_model.xml"
    text = re.sub(r'type="MatMul" version="\w+"', operation, graph.read_text(), count=1)
    graph.write_text(text.replace(ov.__version__, "2031.2.0-1-abc"))
    message = rf"the operation Novel of {opset}, and was written by OpenVINO 2031\.2\.0; OpenVINO \d+\.\d.*, which is"
    with pytest.raises(UnsupportedError, match=message):
        make_runner(folder)


def test_older_releases_are_refused(llama_dir: Path, make_runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ov, "__version__", "2026.1.0-21367-63e31528c62-releases/2026/1")
    with pytest.raises(UnsupportedError, match=r"OpenVINO 2026\.1\.0 is too old: at least 2026\.4 is needed"):
        make_runner(llama_dir)


def test_the_oldest_release_is_the_one_that_is_installed_with_penstock() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    [bound] = [line for line in dependencies if line.startswith("openvino")]
    assert bound.startswith(f"openvino>={'.'.join(map(str, _OLDEST))},")
