"""Prompts with a hole, in the tokens of each model family."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.tokenizers import Tokenizer
from support.models import make_tokenizer

FAMILIES = {
    "qwen2.5-coder": (
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"],
        "{0}a{1}b{2}",
        "<|fim_pad|>",
    ),
    "starcoder": (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "{0}a{1}b{2}", None),
    "code-llama": (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "{0}a{1}b{2}", "▁<EOT>"),
    "deepseek-coder": (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "{0}a{1}b{2}", None),
    "codestral": (["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "{1}b{0}a", None),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_s_prompt_is_as_it_was_trained(tmp_path: Path, name: str) -> None:
    tokens, written, end = FAMILIES[name]
    made = make_tokenizer()
    made.add_tokens(tokens, special_tokens=True)
    made.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    fills = tokenizer.fill_in_middle
    assert fills is not None
    before, behind = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    found = fills.prompt(before, behind)
    assert tokenizer.decode(found, skip_special_tokens=False) == written.format(*tokens)
    assert found == tokenizer.encode(written.format(*tokens), add_special_tokens=False)
    assert fills.ends == (frozenset() if end is None else {tokenizer.id_of(end)})
    assert fills._replace(begin=(7,)).prompt(before, behind) == [7, *found]


@pytest.mark.parametrize("tokens", [[], ["<|fim_prefix|>", "<|fim_suffix|>"], ["[PREFIX]"], ["<fim_middle>"]])
def test_a_model_without_them(tmp_path: Path, tokens: list[str]) -> None:
    made = make_tokenizer()
    made.add_tokens(tokens, special_tokens=True)
    made.save_pretrained(tmp_path)
    assert Tokenizer(tmp_path).fill_in_middle is None
