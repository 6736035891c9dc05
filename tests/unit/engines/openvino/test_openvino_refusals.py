"""What the runner cannot do is refused by name when a model is loaded; nothing is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers_models import edit_config, load_reference, make_model
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.openvino.families import FAMILIES, parse_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported .* LlamaForCausalLM, Mistral",
        ),
        ({"architectures": None}, "unnamed is not supported"),
        ({"architectures": ["X"], "auto_map": {"AutoModel": "evil.py"}}, r"auto_map\) is never run"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"text_config": {}}, "text_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' .* default, linear, llama3, yarn"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "RoPE type 'linear' needs 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "each layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
            "layer_types is not understood",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"] * 3}, "3 entries for 4 layers"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 4}, "no sliding window"),
    ],
)
def test_settings_that_are_not_supported(changes: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    with pytest.raises(UnsupportedError, match=message):
        parse_config(config)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_plain_config_is_enough(architecture: str) -> None:
    spec = parse_config({**CONFIG, "architectures": [architecture]})
    assert (spec.num_layers, len(spec.sliding_windows)) == (4, 4)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0, 0, 0)),
        ({"sliding_window": 9}, (0, 0, 0, 0)),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 9)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, 0, 9, 0),
        ),
    ],
)
def test_qwen_sliding_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_config({**CONFIG, "architectures": ["Qwen2ForCausalLM"], **changes}).sliding_windows == windows


@pytest.mark.parametrize(("window", "windows"), [({"sliding_window": None}, (0,) * 4), ({}, (4096,) * 4)])
def test_mistral_sliding_window(window: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert parse_config({**CONFIG, "architectures": ["MistralForCausalLM"], **window}).sliding_windows == windows


def test_tensors_that_the_graph_would_ignore(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama-biases")
    edit_config(tmp_path, attention_bias=False)
    with pytest.raises(UnsupportedError, match=r"12 tensors that no part of the model uses: .*k_proj\.bias"):
        make_runner(tmp_path)


def test_tensors_that_are_missing(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    edit_config(tmp_path, attention_bias=True)
    with pytest.raises(EngineError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        make_runner(tmp_path)


def test_tensors_of_another_shape(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "llama")
    edit_config(tmp_path, vocab_size=383)
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight has shape \(384, 64\)"):
        make_runner(tmp_path)


def test_leftovers_that_change_nothing(tmp_path: Path, make_runner: Any) -> None:
    """Old checkpoints carry RoPE's frequencies, some tied ones a copy of the head."""
    make_model(tmp_path, "qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tensors["lm_head.weight"] = load_reference(tmp_path).lm_head.weight.data.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert make_runner(tmp_path).info.vocab_size == 384


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_config_that_is_no_config(text: str, tmp_path: Path, make_runner: Any) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"config\.json"):
        make_runner(tmp_path)


def test_no_model_at_all(tmp_path: Path, make_runner: Any) -> None:
    with pytest.raises(EngineError, match=r"config\.json cannot be read"):
        make_runner(tmp_path / "nowhere")
