"""Small models of the families that read images, with what transformers is given of the same images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from penstock.engines.contract.messages import ImageInput
from support.models import SHAPE, VOCAB_SIZE, make_tokenizer, spread
from support.runner import prompt

IMAGE_TOKEN = 259
"""The first behind the tokenizer's bytes."""
COUNT = 10
Tile = np.ndarray[Any, Any]
"""[height, width, 3] in 8 bits."""


@dataclass(frozen=True)
class SeeingFamily:
    model_class: Any
    config_class: Any
    text: dict[str, Any]
    vision: dict[str, Any]
    outer: dict[str, Any]
    """Settings beside these two."""
    tokens: Sequence[str]
    """The first is the one that images take."""
    cell: int
    sizes: Sequence[tuple[int, int]]
    """(height, width) of tiles that tests show it."""
    processor: dict[str, Any]
    """preprocessor_config.json"""
    inputs: Callable[[Sequence[Tile]], dict[str, Any]]
    """What transformers' model is given of tiles."""
    words: Sequence[str] = ()
    """Further tokens, which are not special."""
    newline: int = 0
    """A token stands behind each row of cells but the last."""
    extra: Callable[[torch.Tensor], dict[str, Any]] = field(default=lambda ids: {})
    """What it is given beside tokens."""
    changed: Callable[[PreTrainedModel], None] = field(default=lambda model: None)
    """What is not random after all."""

    def make(self, folder: Path) -> PreTrainedModel:
        """With a tokenizer; returns transformers' model."""
        torch.manual_seed(0)
        model = self.model_class(self.write_settings(folder)).float().eval()
        spread(model)
        self.changed(model)
        model.save_pretrained(folder)
        model.generation_config.eos_token_id = None
        return model  # type: ignore[no-any-return]

    def write_settings(self, folder: Path) -> Any:
        """All files but the weights; returns transformers' settings."""
        config = self.config_class(text_config=SHAPE | self.text, vision_config=self.vision, **self.outer)
        config.architectures = [self.model_class.__name__]
        config.save_pretrained(folder)
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.tokens)})
        tokenizer.add_tokens(list(self.words))
        tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.processor))
        return config

    def tiles(self, seed: int, count: int = 1) -> list[Tile]:
        """Of several sizes, where the family has them."""
        random = np.random.default_rng(seed)
        sizes = [self.sizes[(seed + n) % len(self.sizes)] for n in range(count)]
        return [random.integers(0, 256, (*size, 3), np.uint8) for size in sizes]

    def placed(self, before: Sequence[int], *images: Sequence[Tile], after: Sequence[int] = (5,)) -> Placed:
        """A prompt with images, of so many tiles each. A token stands before each tile."""
        tokens, inputs = list(before), []
        for tiles in images:
            spans = []
            for tile in tiles:
                rows, columns = tile.shape[0] // self.cell, tile.shape[1] // self.cell
                lines = [columns] * rows if self.newline else [rows * columns]
                tokens.append(9)
                for number, count in enumerate(lines):
                    tokens += [self.newline] if number else []
                    spans.append((len(tokens), count))
                    tokens += [IMAGE_TOKEN] * count
            pixels = b"".join(tile.tobytes() for tile in tiles)
            sizes = tuple(tile.shape[:2] for tile in tiles)
            inputs.append(ImageInput(hashlib.sha256(pixels).digest(), pixels, tuple(spans), sizes))
        return Placed([*tokens, *after], inputs, [tile for tiles in images for tile in tiles])

    def reference(self, model: PreTrainedModel, placed: Placed, count: int = COUNT) -> list[int]:
        """Greedy tokens of transformers behind the prompt, EOS or not."""
        ids = torch.tensor([placed.tokens])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                **(self.inputs(placed.tiles) if placed.tiles else {}),
                **self.extra(ids),
            )
        return output[0, len(placed.tokens) :].tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Placed:
    tokens: list[int]
    inputs: list[ImageInput]
    tiles: list[Tile]


def words(length: int, seed: int) -> list[int]:
    """Tokens without those that stand for images."""
    return [token if not IMAGE_TOKEN <= token < IMAGE_TOKEN + 9 else token - 100 for token in prompt(length, seed)]


def stacked(tiles: Sequence[Tile]) -> dict[str, Any]:
    """Values from -1 to 1."""
    return {"pixel_values": torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).float() / 255 * 2 - 1}


def padded(tiles: Sequence[Tile]) -> dict[str, Any]:
    """Pictures of several sizes, with Pixtral's mean and deviation."""
    height, width = (max(tile.shape[n] for tile in tiles) for n in (0, 1))
    values = torch.zeros(len(tiles), 3, height, width)
    for number, tile in enumerate(tiles):
        one = (torch.from_numpy(tile).permute(2, 0, 1).float() / 255 - MEAN) / DEVIATION
        values[number, :, : tile.shape[0], : tile.shape[1]] = one
    return {"pixel_values": values, "image_sizes": torch.tensor([tile.shape[:2] for tile in tiles])}


def in_patches(tiles: Sequence[Tile], patch: int = 4) -> dict[str, Any]:
    """Of several sizes, as LFM2-VL has them."""
    shapes = [(tile.shape[0] // patch, tile.shape[1] // patch) for tile in tiles]
    most = max(rows * columns for rows, columns in shapes)
    values, mask = torch.zeros(len(tiles), most, 3 * patch**2), torch.zeros(len(tiles), most, dtype=torch.long)
    for number, (tile, (rows, columns)) in enumerate(zip(tiles, shapes, strict=True)):
        patches = torch.from_numpy(tile).float().reshape(rows, patch, columns, patch * 3).permute(0, 2, 1, 3)
        values[number, : rows * columns] = patches.reshape(rows * columns, -1) / 255 * 2 - 1
        mask[number, : rows * columns] = 1
    return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}


def in_squares(tiles: Sequence[Tile], patch: int = 4) -> dict[str, Any]:
    """Patches of Gemma 4, with their columns and rows; -1 where there is none."""
    most = max(tile.shape[0] * tile.shape[1] for tile in tiles) // patch**2
    values, places = torch.zeros(len(tiles), most, 3 * patch**2), torch.full((len(tiles), most, 2), -1)
    for number, tile in enumerate(tiles):
        rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
        patches = torch.from_numpy(tile).float().reshape(rows, patch, columns, patch * 3).permute(0, 2, 1, 3)
        values[number, : rows * columns] = patches.reshape(rows * columns, -1) / 255
        places[number, : rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    return {"pixel_values": values, "image_position_ids": places}


def bounded(model: PreTrainedModel) -> None:
    """Gemma 4's encoder: bounds and standards that change something."""
    for name, values in model.named_buffers():
        if name.endswith(("_min", "_max")):
            values.fill_(-0.9 if name.endswith("_min") else 0.8)
        elif "vision_tower.std_" in name:
            values.copy_(torch.linspace(0.5, 1.5, len(values)))


def types_of(ids: torch.Tensor) -> dict[str, Any]:
    return {"mm_token_type_ids": (ids == IMAGE_TOKEN).long()}


MEAN, DEVIATION = (torch.tensor(x)[:, None, None] for x in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
_PIXTRAL = {"model_type": "pixtral", "patch_size": 4, "image_size": 64}
_IMAGENET = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
_MEAN, _DEVIATION = (torch.tensor(x)[:, None, None] for x in _IMAGENET)
_TILES = ["<image>", *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11))]
_BREAKS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_GEMMA4_TEXT: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": False,
}
_GEMMA4_OWN = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "num_kv_shared_layers": 2}
_GEMMA4_VISION = {"head_dim": 16, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 400}
_GEMMA4_TOKENS = ["<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"]
_GEMMA4: dict[str, Any] = {
    "outer": {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 262,
        "audio_token_id": 263,
        "audio_config": None,
        "tie_word_embeddings": False,
    },
    "tokens": _GEMMA4_TOKENS,
    "processor": {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
    "extra": types_of,
    "changed": bounded,
}
_SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}

SEEING_FAMILIES = {
    "gemma3": SeeingFamily(
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24, "num_hidden_layers": 6},
        _SIGLIP | {"image_size": 32, "patch_size": 4, "vision_use_head": False},
        {"mm_tokens_per_image": 16, "image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False},
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        cell=8,
        sizes=[(32, 32)],
        processor={"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        inputs=stacked,
        words=["\n" * count for count in range(2, 6)],
        extra=lambda ids: {"token_type_ids": (ids == IMAGE_TOKEN).long()},
    ),
    "gemma4": SeeingFamily(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        _GEMMA4_TEXT | _GEMMA4_OWN | {"pad_token_id": 7},
        _SIGLIP | _GEMMA4_VISION | {"pooling_kernel_size": 2, "use_clipped_linears": True},
        cell=8,
        sizes=[(16, 40), (32, 8), (24, 24)],
        inputs=in_squares,
        **_GEMMA4,
    ),
    "gemma4-large": SeeingFamily(
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        _GEMMA4_TEXT | {"use_bidirectional_attention": "vision", "attention_k_eq_v": True},
        _SIGLIP | _GEMMA4_VISION | {"pooling_kernel_size": 2, "standardize": True},
        cell=8,
        sizes=[(16, 40), (32, 8), (24, 24)],
        inputs=in_squares,
        **_GEMMA4,
    ),
    "gemma4-unified": SeeingFamily(
        Gemma4UnifiedForConditionalGeneration,
        Gemma4UnifiedConfig,
        _GEMMA4_TEXT,
        {"mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 100, "patch_size": 4, "pooling_kernel_size": 2},
        cell=8,
        sizes=[(16, 40), (32, 8), (24, 24)],
        inputs=lambda tiles: in_squares(tiles, 8),
        **_GEMMA4,
    ),
    "internvl": SeeingFamily(
        InternVLForConditionalGeneration,
        InternVLConfig,
        {"model_type": "qwen2", "tie_word_embeddings": False},
        _SIGLIP | {"image_size": [32, 32], "patch_size": [4, 4], "use_qk_norm": True, "layer_scale_init_value": 0.5},
        {"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": False},
        ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        cell=8,
        sizes=[(32, 32)],
        processor={"size": {"height": 32, "width": 32}, "image_mean": _IMAGENET[0], "image_std": _IMAGENET[1]},
        inputs=lambda tiles: {"pixel_values": (stacked(tiles)["pixel_values"] / 2 + 0.5 - _MEAN) / _DEVIATION},
    ),
    "lfm2-vl": SeeingFamily(
        Lfm2VlForConditionalGeneration,
        Lfm2VlConfig,
        {"model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
        _SIGLIP | {"patch_size": 4, "num_patches": 16, "vision_use_head": False},
        {"image_token_id": IMAGE_TOKEN, "projector_hidden_size": 48, "tie_word_embeddings": False},
        [*_TILES, "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"],
        cell=8,
        sizes=[(16, 40), (32, 8), (24, 24)],
        processor={"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16},
        inputs=in_patches,
    ),
    "pixtral": SeeingFamily(
        LlavaForConditionalGeneration,
        LlavaConfig,
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None, "tie_word_embeddings": False},
        _SIGLIP | _PIXTRAL,
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_token_index": IMAGE_TOKEN},
        _BREAKS,
        cell=4,
        sizes=[(8, 20), (16, 4), (12, 12)],
        processor={"size": {"longest_edge": 24}, "patch_size": 4},
        inputs=padded,
        newline=260,
    ),
    "mistral3": SeeingFamily(
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        {"model_type": "ministral3", "head_dim": 16},
        _SIGLIP | _PIXTRAL,
        {"image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False},
        _BREAKS,
        cell=8,
        sizes=[(16, 40), (32, 8), (24, 24)],
        processor={"size": {"longest_edge": 48}, "patch_size": 4},
        inputs=padded,
        newline=260,
    ),
}
