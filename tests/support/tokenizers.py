"""Small tokenizers of each kind, trained in a moment and saved as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 3.14 o'clock, isn't it?",
    "def main():\n    print('hello world')\n\treturn 0\n",
    "Straße, naïve café, e\u0301te\u0301, Ångström, ½ ³ €100",
    "你好，世界。日本語のテキスト、한국어 문장입니다",
    "नमस्ते दुनिया, हिन्दी में लिखा हुआ",
    "مرحبا بالعالم، هذا نص عربي",
    "👋🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️‍🔥 🤷🏿‍♀️",
]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

KINDS = ("byte_level", "byte_fallback", "unigram_fallback", "metaspace", "wordpiece")


def byte_level(vocab_size: int = 600) -> tokenizers.Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # One token whose characters are outside the byte alphabet, one whose characters only seem to be inside.
    tokenizer.add_tokens(["｜tool｜", "caf\u00e9"])
    return tokenizer


def byte_fallback(strip: int = 1) -> tokenizers.Tokenizer:
    """BPE with byte tokens and the decoder of Llama 2 and Mistral (`strip=0`: that of Gemma)."""
    vocab = {token: n for n, token in enumerate(SPECIALS)}
    for token in (*(f"<0x{byte:02X}>" for byte in range(256)), *_pieces()):
        vocab.setdefault(token, len(vocab))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")] if strip else [normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = _byte_fallback_decoder(strip)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def unigram_fallback() -> tokenizers.Tokenizer:
    """Unigram with byte tokens."""
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *_pieces(), "▁he", "llo", "▁wor", "ld"]
    vocab = [(piece, -float(n) / 100) for n, piece in enumerate(dict.fromkeys(pieces))]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = _byte_fallback_decoder(1)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def metaspace(prepend_scheme: str = "always") -> tokenizers.Tokenizer:
    """Unigram with word-start marks, as in T5."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(vocab_size=250, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    """WordPiece, as in BERT: a decoder that has no table."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    )
    return tokenizer


def bert() -> tokenizers.Tokenizer:
    """WordPiece of words and letters, with BERT's special tokens around texts and pairs."""
    specials = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = ("the", "quick", "brown", "fox", "over", "a", "dog", "in", "bern", "rain", "sun", "is", "what", "weather")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
    pieces = dict.fromkeys([*specials, *words, *letters, *(f"##{letter}" for letter in letters)])
    vocab = {piece: n for n, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(specials))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return tokenizer


def build(kind: str) -> tokenizers.Tokenizer:
    return {
        "byte_level": byte_level,
        "byte_fallback": byte_fallback,
        "unigram_fallback": unigram_fallback,
        "metaspace": metaspace,
        "wordpiece": wordpiece,
    }[kind]()


def save_folder(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; `config` adds to the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _pieces() -> list[str]:
    letters = sorted(set("".join(TEXTS[:3])) - {" "})
    words = [f"▁{word}" for text in TEXTS for word in text.split()[:3]]
    return ["▁", "▁▁", *letters, *words, "好", "\ufffd"]


def _byte_fallback_decoder(strip: int) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(content=" ", left=strip, right=0))
    return decoders.Sequence(steps)
