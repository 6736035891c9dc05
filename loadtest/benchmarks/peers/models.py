"""Makes the models' folders: weights, config.json and a byte-level BPE tokenizer that they all share."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.shapes import SHAPES, VOCABULARY, QwenVision, Shape, Vision
from benchmarks.peers.weights import W8A8_CONFIG, write_weights

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Their places are their ids: 0 fills up, 2 ends a text."""
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's. llama.cpp knows tokenizers by how they split, and this one by name."""
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTENT = "{{ message['content'] }}"
_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
_TRAINING_CHARACTERS = 10_000_000


def make_model(peers_folder: PeersFolder, name: str, folder: Path | None = None, *, w8a8: bool = False) -> Path:
    """The model's folder; made if it is not there, and there only when it is complete. `w8a8`: with weights in 8 bits
    for activations in 8 bits, as compressed-tensors stores them."""
    folder = folder or peers_folder.model(name)
    if folder.is_dir():
        return folder
    tokenizer = _tokenizer(peers_folder)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shape = SHAPES[name]
    shutil.copy(tokenizer, part / "tokenizer.json")
    if shape.vision is not None:
        _make_seeing(part, shape.vision)
    for file, content in (
        ("config.json", shape.config() | (W8A8_CONFIG if w8a8 else {})),
        ("generation_config.json", {"eos_token_id": 2, "pad_token_id": 0}),
        ("tokenizer_config.json", _tokenizer_config(shape)),
    ):
        (part / file).write_text(json.dumps(content, indent=2) + "\n")
    write_weights(shape, part / "model.safetensors", w8a8=w8a8)
    part.rename(folder)
    return folder


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": _template(shape.vision),
    }


def _template(vision: Vision | None) -> str:
    if vision is None:
        return _TEMPLATE
    image, *around = vision.tokens
    if isinstance(vision, QwenVision):
        image = f"{around[0]}{image}{around[1]}"
    return _TEMPLATE.replace(_CONTENT, _PARTS.replace("IMAGE", image))


def _make_seeing(folder: Path, vision: Vision) -> None:
    """Adds tokens that stand for images and around them, and how images are prepared."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(vision.tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = _qwen_processor(vision) if isinstance(vision, QwenVision) else _processor(vision)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


def _processor(vision: Vision) -> dict[str, Any]:
    return {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": vision.longest_edge},
        "max_image_size": {"longest_edge": vision.side},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def _qwen_processor(vision: QwenVision) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 4 * (cell := (vision.patch * vision.joined) ** 2),
        "max_pixels": 16_384 * cell,
        "patch_size": vision.patch,
        "merge_size": vision.joined,
        "temporal_patch_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _tokenizer(peers_folder: PeersFolder) -> Path:
    """Trained on the source of Python's standard library, which every machine has."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    path = peers_folder.model("tokenizer.json")
    if path.is_file():
        return path
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def _text() -> Iterator[str]:
    total = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        text = file.read_text(errors="replace")
        yield text
        total += len(text)
        if total > _TRAINING_CHARACTERS:
            return
