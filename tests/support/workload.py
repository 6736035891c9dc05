"""Settings, tokenizers and files for the tests of workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from penstock.loadtest import workload
from penstock.loadtest.messages import Call, Session
from penstock.loadtest.options import Options, options

DEMO = Path(__file__).parents[2] / "gateway/penstock/gateway/demo_model"
NAMES = [one + more for one in "bcdfghklmp" for more in ("ad", "en", "id", "ot", "ut", "am", "el", "ip", "on")]

TEXT = [
    "the cat sat on the mat and the dog sat on the cat",
    "one of the things that all of the people in the world have to do is to work for a living",
    "of the and of the in the to the for the on the at the by the from the with the",
]


def settings(protocol: str = "openai-completions", **values: Any) -> Options:
    return options({"url": "http://h", "protocol": protocol, **values})


def sessions(protocol: str = "openai-completions", **values: Any) -> list[Session]:
    return list(workload.build(settings(protocol, **values)))


def calls(protocol: str = "openai-completions", **values: Any) -> list[Call]:
    return [call for session in sessions(protocol, **values) for call in session.calls]


def write(folder: Path, name: str, *lines: str) -> str:
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def saved(tokenizer: Tokenizer, folder: Path) -> str:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def demo_with_bos() -> Tokenizer:
    """Puts one special token before each text, as Llama's do, and would cut long ones."""
    tokenizer = demo()
    template = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.post_processor = template
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    return tokenizer


def joining() -> Tokenizer:
    """Has tokens that span words, so that a text has fewer tokens than words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    alphabet = list("abcdefghijklmnopqrstuvwxyz\u2581")
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=200, initial_alphabet=alphabet))
    return tokenizer


def rarely_joining() -> Tokenizer:
    """Has one token that spans words among many that do not."""
    pieces = [("<unk>", 0.0), ("\u2581bad\u2581ben", -1.0), *((f"\u2581{name}", -2.0) for name in NAMES)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((letter, -9.0) for letter in "abcdefghijklmnopqrstuvwxyz")], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return tokenizer


def letters() -> Tokenizer:
    """A token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def doubled_letters() -> Tokenizer:
    """Makes two tokens of each letter: no text has just one."""
    tokenizer = letters()
    tokenizer.normalizer = normalizers.Replace(Regex("[a-z]"), "aa")
    return tokenizer


def word_pieces() -> Tokenizer:
    """BERT's way, with words that are whole."""
    vocabulary = {name: number for number, name in enumerate(["[UNK]", *NAMES, "##s"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
