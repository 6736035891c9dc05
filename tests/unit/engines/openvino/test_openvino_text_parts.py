"""The language models in checkpoints that also take images: the tokens of transformers, in f32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from penstock.engines.errors import UnsupportedError
from support.engine import Driver as EngineDriver
from support.models import (
    FAMILIES,
    SHAPE,
    edit_config,
    make_adapter,
    make_tokenizer,
    merge_adapter,
    reference_tokens,
    spread,
)
from support.other_families import OTHER_FAMILIES
from support.runner import Driver, prompt

COUNT = 12
FILE = "model.safetensors"
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
GROWING = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}
MISTRAL4 = GROWING | {"rope_type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 0.7}
MODELS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (Gemma3ForConditionalGeneration, Gemma3Config, {"head_dim": 16, "sliding_window": 24}, VISION),
    "gemma4": (
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        OTHER_FAMILIES["gemma4"][2],
        VISION | {"head_dim": 8, "position_embedding_size": 16},
    ),
    "gemma4-unified": (
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedConfig,
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        {"mm_embed_dim": 64, "mm_posemb_size": 16},
    ),
    "llama4": (
        Llama4ForConditionalGeneration,
        Llama4Config,
        {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
        VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "mistral3": (
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        {"model_type": "mistral", "head_dim": 16},
        VISION | {"model_type": "pixtral", "head_dim": 8},
    ),
    "ministral3": (
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": GROWING},
        VISION | {"model_type": "pixtral", "head_dim": 8},
    ),
    "mistral4": (
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        {
            "model_type": "mistral4",
            "num_key_value_heads": 4,
            "rope_parameters": MISTRAL4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        VISION | {"model_type": "pixtral", "head_dim": 8},
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    ),
    "qwen3.5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config,
        FAMILIES["qwen3.5"][2],
        {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig,
        OTHER_FAMILIES["qwen3.5-moe"][2],
        {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    ),
}


def make(folder: Path, family: str) -> PreTrainedModel:
    model_class, config_class, text, vision = MODELS[family]
    torch.manual_seed(0)
    model = model_class(config_class(text_config=SHAPE | text, vision_config=vision)).float().eval()
    spread(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    model = model.language_model if family == "llama4" else model  # the whole one cannot generate without an image
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("family", list(MODELS))
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path, make_runner: Any) -> None:
    model = make(tmp_path, family)
    tokens = prompt(45, 1)
    runner = make_runner(tmp_path)
    assert Driver(runner).generate([tokens], COUNT) == [reference_tokens(model, tokens, COUNT)]
    if family == "gemma3":
        assert runner.info.image_grid is None, "patches that do not fill its tiles cost it its eyes only"


@pytest.mark.parametrize(
    ("family", "renamed"),
    [
        ("gemma3", None),
        ("mistral3", (".model.language_model.", ".language_model.model.")),  # as older releases of transformers save it
    ],
)
def test_adapters_of_the_whole_model(
    family: str, renamed: tuple[str, str] | None, tmp_path: Path, make_runner: Any
) -> None:
    """What they change of the part that sees images does not matter to a text."""
    model = make(tmp_path, family)
    adapter = make_adapter(tmp_path / "adapter", model)
    merge_adapter(model, adapter)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    assert any("vision_tower" in name for name in tensors)
    assert any(".model.language_model." in name for name in tensors)
    if renamed is not None:
        save_file({name.replace(*renamed): tensor for name, tensor in tensors.items()}, path)
    driver = EngineDriver(make_runner(tmp_path, max_loras=1, adapters={"a": adapter}), max_num_seqs=1)
    [request] = driver.add(prompt(45, 3), COUNT, adapter="a")
    driver.run()
    assert driver.tokens[request] == reference_tokens(model, prompt(45, 3), COUNT)


def test_a_layer_for_multi_token_prediction_is_left_out(tmp_path: Path, make_runner: Any) -> None:
    """Qwen3.5 is published with one."""
    expected = reference_tokens(make(tmp_path, "qwen3.5"), prompt(45, 2), COUNT)
    tensors = load_file(tmp_path / FILE)
    save_file({**tensors, "mtp.norm.weight": torch.ones(64)}, tmp_path / FILE, {"format": "pt"})
    assert Driver(make_runner(tmp_path)).generate([prompt(45, 2)], COUNT) == [expected]


def test_older_names_and_settings(tmp_path: Path, make_runner: Any) -> None:
    """As Qwen2.5-VL was published: one object of settings, and the language model's tensors without their prefix."""
    wanted = reference_tokens(make(tmp_path, "qwen2.5-vl"), prompt(45, 2), COUNT)
    tensors = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(tmp_path / FILE).items()
    }
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e4}
    kept = {key: value for key, value in text.items() if key not in ("architectures", "rope_parameters")}
    (tmp_path / "config.json").write_text(json.dumps({**kept, **config, **rope}))
    assert Driver(make_runner(tmp_path)).generate([prompt(45, 2)], COUNT) == [wanted]


def test_another_text_model_than_the_usual_one(tmp_path: Path, make_runner: Any) -> None:
    """Mistral Small 3 and Ministral 3 are published under one name."""
    make(tmp_path, "mistral3")
    config = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, text_config=config["text_config"] | {"model_type": "llama"})
    with pytest.raises(UnsupportedError, match="text_config of mistral or ministral3 or mistral4, not of 'llama'"):
        make_runner(tmp_path)


def test_settings_that_are_no_object(tmp_path: Path, make_runner: Any) -> None:
    make(tmp_path, "mistral3")
    edit_config(tmp_path, text_config="mistral")
    with pytest.raises(UnsupportedError, match="text_config=mistral, which is not an object"):
        make_runner(tmp_path)
