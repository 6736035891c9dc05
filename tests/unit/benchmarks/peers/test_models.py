"""Models made without torch load in transformers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from benchmarks.peers import models
from benchmarks.peers.models import make_model
from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.shapes import SHAPES, VOCABULARY, DeltaNet, Experts, Shape
from benchmarks.peers.weights import write_weights

SMALL = {
    name: msgspec.structs.replace(
        shape,
        layers=2,
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=2,
        head_dim=32 if shape.head_dim else 0,
        vocabulary=min(shape.vocabulary, VOCABULARY + 64),
        attends=None if shape.attends is None else (1,),
        delta=shape.delta and DeltaNet(heads=2, head=16, kernel=4),
        vision=shape.vision
        and msgspec.structs.replace(
            shape.vision, layers=2, hidden=32, intermediate=48, heads=2, side=32, patch=8, joined=2
        ),
        experts=shape.experts and Experts(number=4, chosen=2, size=32, dense=1),
    )
    for name, shape in SHAPES.items()
}


@pytest.fixture
def peers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeersFolder:
    monkeypatch.setattr(models, "_text", lambda: iter(["def one(two): return three\n" * 20]))
    for name, shape in SMALL.items():
        monkeypatch.setitem(SHAPES, name, shape)
    return PeersFolder(tmp_path)


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_finds_every_weight_it_knows(peers_folder: PeersFolder, name: str) -> None:
    folder = make_model(peers_folder, name)
    kind = AutoModelForCausalLM if SMALL[name].vision is None else AutoModelForImageTextToText
    model, about = kind.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    assert model.config.tie_word_embeddings == SMALL[name].tied
    assert model.config.get_text_config().rope_parameters["rope_theta"] == SMALL[name].rope_theta
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7]])).logits
    assert logits.shape == (1, 3, SMALL[name].vocabulary)
    assert int(logits[0, -1].argmax()) < VOCABULARY, "tokens that the tokenizer has"


def test_the_tokenizer_is_shared_and_knows_chats(peers_folder: PeersFolder) -> None:
    tokenizers = [AutoTokenizer.from_pretrained(make_model(peers_folder, name)) for name in SHAPES]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    text = tokenizers[0].apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizers[0].eos_token_id == 2
    assert Tokenizer.from_file(str(peers_folder.model("tokenizer.json"))).decode([0, 2], skip_special_tokens=False)


def test_equal_seeds_give_equal_bytes(tmp_path: Path) -> None:
    shape: Shape = SMALL["qwen05b-shape"]
    for number, seed in enumerate((1, 1, 2)):
        write_weights(shape, tmp_path / str(number), seed)
    first, second, third = ((tmp_path / str(number)).read_bytes() for number in range(3))
    assert first == second
    assert first != third


def test_weights_have_their_spread_and_norms_are_one(tmp_path: Path) -> None:
    write_weights(SMALL["tiny"], tmp_path / "w")
    with safe_open(tmp_path / "w", "pt") as file:
        assert float(file.get_tensor("lm_head.weight").float().std()) == pytest.approx(0.05, rel=0.02)
        assert (file.get_tensor("model.norm.weight") == 1).all()
        assert file.get_tensor("model.norm.weight").dtype == torch.bfloat16


def test_what_was_half_made_is_made_again(peers_folder: PeersFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "write_weights", lambda shape, path, w8a8: path.touch())
    (peers_folder.model("tiny").with_name("tiny.part") / "x").mkdir(parents=True)
    make_model(peers_folder, "tiny")
    assert sorted(path.name for path in peers_folder.model("tiny").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not peers_folder.model("tiny").with_name("tiny.part").exists()


def test_weights_in_8_bits_are_those_of_the_model(tmp_path: Path) -> None:
    """Each within half a step of its row's scale."""
    write_weights(SMALL["qwen05b-shape"], tmp_path / "plain")
    write_weights(SMALL["qwen05b-shape"], tmp_path / "small", w8a8=True)
    with safe_open(tmp_path / "plain", "pt") as plain, safe_open(tmp_path / "small", "pt") as small:
        names = set(small.keys())
        assert {name for name in names if not name.endswith("_scale")} == set(plain.keys())
        name = "model.layers.0.mlp.down_proj.weight"
        weights, scales = small.get_tensor(name), small.get_tensor(f"{name}_scale")
        assert weights.dtype == torch.int8
        assert scales.shape == (weights.shape[0], 1)
        off = (weights * scales - plain.get_tensor(name).float()).abs() / scales
        assert float(off.max()) < 0.5 + 0.3, "bf16, with which it is compared, has a step of its own"
        assert weights.abs().max() == 127
        assert small.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16
