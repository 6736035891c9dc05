"""Small models that read images, images for them, and the tokens of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedModel,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from penstock.engines.contract.messages import ImageInput
from support.models import SHAPE, make_tokenizer, reference_tokens, spread
from support.runner import prompt

IMAGE_TOKEN = 259
"""The first behind the bytes; then come the others that stand around images."""
_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>"]
_TOKENS += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% if m['content'] is string %} {{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
PROCESSOR = {"size": {"longest_edge": 4 * 32}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
SIDE, TOKENS = 32, 4
"""Of a tile: 4 x 4 patches, joined by 2 x 2."""
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
}
_CLASSES: dict[str, tuple[Any, Any]] = {
    "smolvlm": (SmolVLMForConditionalGeneration, SmolVLMConfig),
    "idefics3": (Idefics3ForConditionalGeneration, Idefics3Config),
}


def make_seeing_model(folder: Path, family: str = "smolvlm") -> PreTrainedModel:
    """With a tokenizer; returns transformers' model."""
    model_class, config_class = _CLASSES[family]
    torch.manual_seed(0)
    text = SHAPE | {"model_type": "llama", "tie_word_embeddings": False}
    config = config_class(text_config=text, vision_config=_VISION, image_token_id=IMAGE_TOKEN, scale_factor=2)
    model = model_class(config).float().eval()
    spread(model)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": _TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    model.generation_config.eos_token_id = None
    return model  # type: ignore[no-any-return]


def words(length: int, seed: int) -> list[int]:
    """Tokens without that of images."""
    return [token if token != IMAGE_TOKEN else token + 1 for token in prompt(length, seed)]


def tiles(seed: int, count: int = 1) -> np.ndarray[Any, Any]:
    """[count, SIDE, SIDE, 3]"""
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)


def with_images(
    before: Sequence[int], *images: np.ndarray[Any, Any], after: Sequence[int] = (5,), between: Sequence[int] = (7,)
) -> tuple[list[int], list[ImageInput]]:
    """A prompt, and the images in it. A token stands between the tiles of an image, `between` between images."""
    prompt, inputs = list(before), []
    for number, image in enumerate(images):
        prompt += between if number else ()
        spans = []
        for _ in image:
            prompt.append(9)
            spans.append((len(prompt), TOKENS))
            prompt += [IMAGE_TOKEN] * TOKENS
        key = hashlib.sha256(image.tobytes()).digest()
        inputs.append(ImageInput(key, image.tobytes(), tuple(spans), ((SIDE, SIDE),) * len(image)))
    return [*prompt, *after], inputs


def reference_tokens_with_images(
    model: PreTrainedModel,
    prompt: Sequence[int],
    images: Sequence[np.ndarray[Any, Any]],
    count: int,
    guess: Sequence[int] = (),
) -> list[int]:
    """As `reference_tokens`."""
    pixels = torch.from_numpy(np.concatenate(images)).permute(0, 3, 1, 2).float() / 255 * 2 - 1
    return reference_tokens(model, prompt, count, guess, pixel_values=pixels[None])
