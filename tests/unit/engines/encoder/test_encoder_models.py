"""Vectors and logits of every architecture are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.encoder.model import EncoderModel
from penstock.engines.encoder.model_folder import read_recipe
from penstock.engines.encoder.text import TokenizedText
from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from penstock.engines.openvino.config import OpenVINOConfig
from support.encoders import (
    FAMILIES,
    export_graph,
    make_encoder,
    reference,
    reference_rows,
    sentence_files,
    token_files,
)

LENGTHS = (1, 2, 7, 16, 17, 40, 64)
"""In one batch: padding and neighbours change nothing."""


def texts(types: bool = False) -> list[TokenizedText]:
    draw = np.random.default_rng(5)
    return [
        TokenizedText(
            draw.integers(5, 90, length).tolist(), [int(n >= length // 2) for n in range(length)] if types else None
        )
        for length in LENGTHS
    ]


def load(folder: Path, **settings: object) -> EncoderModel:
    config = OpenVINOConfig(folder, **{"dtype": "f32", "threads": 1, **settings})  # type: ignore[arg-type]
    return EncoderModel(config, read_recipe(folder))


def assert_alike(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 1e-4 * max(1.0, np.abs(wanted).max())


@pytest.mark.families("Bert", "Roberta", "Electra", "DistilBert", "MPNet", "ModernBert")
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_every_family_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, family)
    assert_alike(load(folder).compute(texts()), reference_rows(reference(folder), texts()))


@pytest.mark.families("Bert", "Roberta", "Electra", "DistilBert", "MPNet", "ModernBert")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, family, labels=3)
    assert_alike(load(folder).compute(texts(types=True)), reference_rows(reference(folder), texts(types=True)))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Bert", {"hidden_act": "gelu_new"}),
        ("Bert", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
        ("DistilBert", {"activation": "relu"}),
        ("ModernBert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
        ("ModernBert", {"classifier_pooling": "mean", "classifier_bias": True, "labels": 2}),
        ("ModernBert", {"max_position_embeddings": 1024}),
        ("Roberta", {"max_position_embeddings": 700}),
        ("MPNet", {"max_position_embeddings": 700}),
    ],
)
def test_settings_change_results_as_in_the_reference(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    """Models for longer texts have attention in another form."""
    folder = make_encoder(tmp_path, family, **settings)  # type: ignore[arg-type]
    assert_alike(load(folder).compute(texts()), reference_rows(reference(folder), texts()))


@pytest.mark.parametrize("family", ["MPNet", "ModernBert"])
def test_distances_beyond_the_last_bucket(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, family, max_position_embeddings=512)
    long = [TokenizedText([5 + n * 7 % 80 for n in range(400)])]
    assert_alike(load(folder).compute(long), reference_rows(reference(folder), long))


@pytest.mark.parametrize(
    "mode",
    ["cls_token", "lasttoken", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"],
)
def test_every_kind_of_pooling_is_as_in_the_reference(mode: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, files=sentence_files(mode))
    assert_alike(load(folder).compute(texts()), reference_rows(reference(folder), texts(), mode))


def test_pooling_of_several_kinds_and_a_dense_layer(tmp_path: Path) -> None:
    files = sentence_files("mean_tokens")
    files["1_Pooling/config.json"]["pooling_mode_cls_token"] = True
    files["modules.json"].insert(2, {"path": "2_Dense", "type": "sentence_transformers.models.Dense.Dense"})
    files["2_Dense/config.json"] = {
        "in_features": 64,
        "out_features": 8,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    folder = make_encoder(tmp_path, files=files)
    weight, bias = torch.randn(8, 64), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    model = reference(folder)
    both = np.hstack([reference_rows(model, texts(), mode) for mode in ("cls_token", "mean_tokens")])
    assert_alike(load(folder).compute(texts()), np.tanh(both @ weight.numpy().T + bias.numpy()))


def test_a_vector_for_each_token(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, files=token_files())
    found = load(folder).compute(texts())
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"].numpy()
    model = reference(folder)
    for rows, text in zip(found, texts(), strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([list(text.ids)])).last_hidden_state[0].numpy()
        assert_alike(rows, hidden @ weight.T)


def test_a_model_with_a_head_of_its_training_gives_vectors(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    wanted = reference_rows(reference(folder), texts())
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["BertForMaskedLM"]}))
    assert_alike(load(folder).compute(texts()), wanted)


@pytest.mark.parametrize(
    ("family", "labels", "kind"),
    [
        ("Bert", 0, "onnx"),
        ("Bert", 3, "openvino"),
        ("Roberta", 0, "openvino"),
        ("Roberta", 3, "onnx"),
        ("Albert", 3, "onnx"),
    ],
)
def test_exported_graphs(family: str, labels: int, kind: str, tmp_path: Path) -> None:
    """Without weights beside them; of families that are known here, and of one that is not. Rows of 80 tokens would be
    more than there are positions."""
    folder = make_encoder(tmp_path, family, labels=labels, max_position_embeddings=75)
    export_graph(folder, kind)
    batch = [*texts(), TokenizedText([5 + n * 7 % 80 for n in range(70)])]
    wanted = reference_rows(reference(folder), batch)
    (folder / "model.safetensors").unlink()
    assert_alike(load(folder).compute(batch), wanted)


@pytest.mark.parametrize("mode", ["cls_token", "weightedmean_tokens"])
def test_pooling_of_exported_graphs(mode: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, files=sentence_files(mode))
    wanted = reference_rows(reference(folder), texts(), mode)
    export_graph(folder, "openvino")
    (folder / "model.safetensors").unlink()
    assert_alike(load(folder).compute(texts()), wanted)


def test_weights_come_before_an_exported_graph(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"never read")
    assert load(folder).info.output_size == 32
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"model\.onnx cannot be read"):
        load(folder)


def test_an_exported_graph_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    path = export_graph(folder, "openvino")
    (folder / "model.safetensors").unlink()
    text = path.read_text()
    path.write_text(text.replace('names="input_ids"', 'names="pixels"'))
    with pytest.raises(UnsupportedError, match="has the input pixels; known are input_ids"):
        load(folder)
    path.write_text(text.replace('names="last_hidden_state"', 'names="boxes"'))
    with pytest.raises(UnsupportedError, match="has the outputs boxes; needed is one of last_hidden_state"):
        load(folder)


def test_what_it_tells_of_itself(tmp_path: Path) -> None:
    info = load(make_encoder(tmp_path, "Roberta", files=sentence_files(max_tokens=64))).info
    assert (info.max_tokens, info.vocab_size, info.output_size) == (64, 160, 32)


def test_positions_bound_the_length(tmp_path: Path) -> None:
    """RoBERTa's first positions are not used."""
    folder = make_encoder(tmp_path, "Roberta", files=sentence_files(max_tokens=500))
    assert load(folder).info.max_tokens == 78
    assert load(folder, max_model_len=20).info.max_tokens == 20
    with pytest.raises(InvalidRequestError, match="more than the model's 78 tokens"):
        load(folder, max_model_len=79)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activations": "int8"}, "activations=int8 cannot be combined with weights=auto and dtype=f32; f32 can"),
        ({"activations": "mixed"}, "activations=mixed cannot be combined with weights=auto"),
        ({"activations": "mixed", "weights": "int8"}, "activations=mixed cannot be combined with weights=int8"),
    ],
)
def test_activations_that_would_change_nothing(settings: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        load(make_encoder(tmp_path), **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["T5Model"]}, "is no encoder of these: Bert"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "swiglu"}, "activation 'swiglu'"),
        ({"is_decoder": True}, "decoders made of encoders"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints"),
        ({"num_attention_heads": 5}, "not divided by 5"),
        ({"num_hidden_layers": 2}, "tensors that no part of the model uses"),
        ({"vocab_size": 161}, "has shape"),
    ],
)
def test_what_is_not_supported_or_does_not_fit_is_refused_by_name(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = make_encoder(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises((UnsupportedError, EngineError), match=message):
        load(folder)
