"""Small models of the Qwen families that read images, images for them, and the tokens of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.engines.contract.messages import ImageInput
from support.images import IMAGE_TOKEN
from support.models import FAMILIES, SHAPE, make_tokenizer, spread

PATCH, CELL = 4, 8
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% if m['content'] is string %} {{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
_TOKENS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
_IDS = {"image_token_id": 259, "vision_start_token_id": 260, "vision_end_token_id": 261, "video_token_id": 262}
_VISION = {"depth": 3, "num_heads": 2, "patch_size": PATCH}
_SHAPE = SHAPE | {"num_hidden_layers": 2, "tie_word_embeddings": False}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_OF_QWEN3 = _VISION | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 25}
_CLASSES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (
        Qwen2VLForConditionalGeneration,
        Qwen2VLConfig,
        {"rope_parameters": _SECTIONS},
        _VISION | {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64},
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        {"rope_parameters": _SECTIONS},
        _VISION
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 2 * CELL}
        | {"fullatt_block_indexes": [1]},
    ),
    "qwen3-vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        {"head_dim": 16, "rope_parameters": _SECTIONS | {"mrope_section": [3, 3, 2]}},
        _OF_QWEN3 | {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3-vl-moe": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig,
        {"head_dim": 16, "rope_parameters": _SECTIONS | {"mrope_section": [3, 3, 2]}}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        _OF_QWEN3 | {"deepstack_visual_indexes": [1]},
    ),
    "qwen3.5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config,
        FAMILIES["qwen3.5"][2]
        | {"rope_parameters": _SECTIONS | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
        _OF_QWEN3,
    ),
}
QWEN_FAMILIES = tuple(_CLASSES)


def make_qwen(folder: Path, family: str) -> PreTrainedModel:
    """With a tokenizer; returns transformers' model."""
    model_class, config_class, text, vision = _CLASSES[family]
    torch.manual_seed(0)
    config = config_class(text_config=_SHAPE | text, vision_config=vision, tie_word_embeddings=False, **_IDS)
    model = model_class(config).float().eval()
    spread(model)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": _TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_settings(family)))
    model.generation_config.eos_token_id = None
    return model  # type: ignore[no-any-return]


def processor_settings(family: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2}
    settings["size"] = {"shortest_edge": 4 * CELL**2, "longest_edge": 40 * CELL**2}
    if not family.startswith("qwen2"):
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return settings


def processor(family: str) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(**processor_settings(family))


def picture(seed: int, rows: int = 3, columns: int = 5) -> np.ndarray[Any, Any]:
    """[height, width, 3], of so many tokens."""
    return np.random.default_rng(seed).integers(0, 256, (rows * CELL, columns * CELL, 3), np.uint8)


def with_pictures(
    before: Sequence[int], *pictures: np.ndarray[Any, Any], after: Sequence[int] = (5, 6)
) -> tuple[list[int], list[ImageInput]]:
    """A prompt, and the pictures in it, one token between them."""
    prompt, inputs = list(before), []
    for pixels in pictures:
        height, width, _ = pixels.shape
        count = height * width // CELL**2
        prompt.append(260)
        key = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
        inputs.append(ImageInput(key, pixels.tobytes(), ((len(prompt), count),), ((height, width),)))
        prompt += [IMAGE_TOKEN] * count
    return [*prompt, *after], inputs


def reference_tokens_with_pictures(
    model: PreTrainedModel, family: str, prompt: Sequence[int], pictures: Sequence[np.ndarray[Any, Any]], count: int
) -> list[int]:
    """`count` greedy tokens behind the prompt, EOS or not."""
    tensors = processor(family)(list(pictures), return_tensors="pt", do_resize=False)
    ids = torch.tensor([list(prompt)])
    if prompt[-1] == IMAGE_TOKEN:
        return _whole(model, ids, count, tensors)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == IMAGE_TOKEN).int(),
            max_new_tokens=count,
            do_sample=False,
            **tensors,
        )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _whole(model: PreTrainedModel, ids: torch.Tensor, count: int, tensors: Any) -> list[int]:
    """Each token from all before it: behind a picture that ends the prompt, `generate` counts positions in another way
    than the model itself does."""
    length = ids.shape[1]
    for _ in range(count):
        kinds = (ids == IMAGE_TOKEN).int()
        with torch.inference_mode():
            logits = model(ids, mm_token_type_ids=kinds, use_cache=False, logits_to_keep=1, **tensors).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, length:].tolist()  # type: ignore[no-any-return]
