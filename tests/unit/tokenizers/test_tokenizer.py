from __future__ import annotations

import json
import sys
import threading
from codecs import BOM_UTF8
from pathlib import Path

import pytest
import tokenizers

from penstock.tokenizers import Tokenizer, TokenizerError
from support.tokenizers import KINDS, TEXTS, build, byte_level, save_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(save_folder(tmp_path_factory.mktemp("tokenizer"), byte_level()))


@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_and_texts_as_transformers(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    backend = build(kind)
    ours = Tokenizer(save_folder(tmp_path, backend))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    for text in [*TEXTS, "<s>a<|im_end|> b</s>", ""]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == expected


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.eos_token_id == tokenizer.id_of("</s>") == 2
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.vocab_size == max(tokenizer.table.texts | tokenizer.table.partial) + 1
    assert tokenizer.id_of("no such token") is None


def test_added_special_tokens_of_the_config_are_used(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    decoder = {str(size): {"content": "<|call|>", "special": True}, "9999": {"content": "<|gap|>"}}
    config = {"added_tokens_decoder": decoder, "eos_token": {"content": "<|call|>"}, "pad_token": "Ġ"}
    tokenizer = Tokenizer(save_folder(tmp_path, backend, config))
    assert tokenizer.eos_token_id == size
    assert tokenizer.encode("<|call|>") == [size]
    assert tokenizer.id_of("<|gap|>") is None
    assert tokenizer.decode([size, 3]) == ""
    assert tokenizer.id_of("Ġ") in tokenizer.special_ids


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, byte_level(), {"eos_token": None})
    extra = {"eos_token": "<|im_end|>", "bos_token": "ignored"}
    (folder / "special_tokens_map.json").write_text(json.dumps(extra))
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<|im_end|>")


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(Tokenizer(save_folder(tmp_path, backend)).encode("q" * 9)) == 9


def test_special_tokens_are_added_on_demand(tmp_path: Path) -> None:
    backend = byte_level()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = Tokenizer(save_folder(tmp_path, backend))
    with_bos = tokenizer.encode("hello")
    assert with_bos == [1, *tokenizer.encode("hello", add_special_tokens=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_each_token_make_the_text(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer(save_folder(tmp_path, build(kind)))
    ids = tokenizer.encode("hello wørld", add_special_tokens=False)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert text.replace(" ", "").replace("##", "") == tokenizer.decode(ids, False).replace(" ", "")


def test_printable_forms(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🧿")
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data == "🧿".encode()
    shown = [tokenizer.token_text(i) for i in ids]
    assert shown[0].startswith(r"bytes:\xf0")
    assert "".join(text.removeprefix("bytes:") for text in shown) == r"\xf0\x9f\xa7\xbf"
    assert tokenizer.token_text(4) == "<|im_end|>"
    assert tokenizer.token_text(tokenizer.encode("｜tool｜")[0]) == "｜tool｜"


@pytest.mark.parametrize("bad", [-1, 2**40])
def test_ids_out_of_range(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(TokenizerError, match="out of range"):
        tokenizer.decode([bad])


def test_ids_that_only_the_model_has_contribute_nothing(tokenizer: Tokenizer) -> None:
    """Models' vocabularies are padded; such an id can be sampled, or stand among the likeliest."""
    padded = tokenizer.vocab_size + 3
    assert tokenizer.decode([padded]) == ""
    assert (tokenizer.token_bytes(padded), tokenizer.token_text(padded)) == (b"", "")


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    ready, go, ran = threading.Semaphore(0), threading.Semaphore(0), []

    def other() -> None:
        ready.release()
        go.acquire()
        ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    ready.acquire()
    interval = sys.getswitchinterval()
    # From here on the interpreter changes threads only where one lets go of the GIL by itself.
    sys.setswitchinterval(60)
    try:
        go.release()
        tokenizer.encode("The quick brown fox. " * 20_000)
        ran_meanwhile = list(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert ran_meanwhile == [True]


def test_several_chat_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = save_folder(tmp_path, byte_level(), {"chat_template": named})
    assert Tokenizer(folder).chat_templates == {"default": "D", "tool_use": "T"}
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert Tokenizer(folder).chat_template == "J"
    (folder / "chat_template.jinja").write_text("F")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert Tokenizer(folder).chat_templates == {"default": "F", "tool_use": "T", "rag": "R"}


def test_a_base_model_has_no_template(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "[", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template must be a string"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template must be a string"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "added_tokens_decoder"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = save_folder(tmp_path, byte_level())
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(folder)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is not a folder"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model.*convert it once.*save_pretrained"):
        Tokenizer(tmp_path)


def test_files_with_byte_order_marks(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "chat_template": "of the config"}
    folder = save_folder(tmp_path, byte_level(), config)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    for path in (path for path in folder.rglob("*") if path.is_file()):
        path.write_bytes(BOM_UTF8 + path.read_bytes())
    tokenizer = Tokenizer(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("</s>", "<s>")
    assert tokenizer.chat_templates == {"default": "{{ messages }}", "rag": "{{ documents }}"}
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_a_library_that_panics_is_an_error_like_others(tmp_path: Path) -> None:
    """pyo3 raises a BaseException then, which would end the thread that reads the model."""
    folder = save_folder(tmp_path, byte_level())
    file = folder / "tokenizer.json"
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}))
    with pytest.raises(TokenizerError, match="precompiled_charsmap"):
        Tokenizer(folder)
    piece = {"SpecialToken": {"id": "<none>", "type_id": 0}}
    processor = {"type": "TemplateProcessing", "single": [piece], "pair": [], "special_tokens": {}}
    file.write_text(json.dumps(plain | {"post_processor": processor}))
    with pytest.raises(TokenizerError, match="cannot be tokenized"):
        Tokenizer(folder).encode("a text", add_special_tokens=True)
