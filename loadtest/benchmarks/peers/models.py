"""Makes the models' folders: weights, config.json and a byte-level BPE tokenizer that they all share."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.shapes import SHAPES, VOCABULARY, Shape, Vision
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
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
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
        "chat_template": _TEMPLATE if shape.vision is None else _TEMPLATE.replace(_CONTENT, _PARTS),
    }


def _make_seeing(folder: Path, vision: Vision) -> None:
    """Adds tokens that stand for images and around them, and how images are prepared."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer.add_special_tokens(["<image>", "<fake_token_around_image>", "<global-img>", *tiles])
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": vision.longest_edge},
        "max_image_size": {"longest_edge": vision.side},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


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
