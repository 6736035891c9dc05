from __future__ import annotations

import pytest

from penstock.tokenizers import lark
from penstock.tokenizers.grammars import GrammarError
from support.grammars import BlindWriter

TAG, LONGER = "<a>", "<a><b>"
IDS = {TAG: 7, LONGER: 8}
PRINTABLE = "".join(map(chr, range(32, 127)))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> BlindWriter:
    return BlindWriter(tmp_path_factory.mktemp("model"), [TAG], special=True)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("", ""),
        ('say "hi"\n', r'"say \"hi\"\n"'),
        ("<a>", "<[7]>"),
        ("x<a><b>y<a>", '"x" <[8]> "y" <[7]>'),
        ("<b>", '"<b>"'),
    ],
)
def test_literals_are_quoted_and_special_tokens_are_ids(text: str, written: str) -> None:
    assert lark.literal(text, IDS) == written


def test_a_literal_is_all_that_is_taken(writer: BlindWriter) -> None:
    text = f"{PRINTABLE}\t\r\n\\u0041 ü 木 😀{TAG}"
    grammar = f"start: {lark.literal(text, writer.added_texts)}"
    assert writer.write("grammar", grammar, 0) == text
    for other in (text[:-1], text + " ", text.replace("A", "a", 1), text.replace("😀", "😁")):
        assert not writer.takes("grammar", grammar, other)


@pytest.mark.parametrize("end", ["</x>", "a\nb", "[END]", r"\d+", "/*", PRINTABLE, "。"])
def test_up_to_the_first_occurrence(writer: BlindWriter, end: str) -> None:
    grammar = f'start: t "!"\nt[lazy]: {lark.regex(lark.up_to(end))}'
    for before in ("", "some\ntext ", end[:-1], "/ // \\/ "):
        assert writer.takes("grammar", grammar, f"{before}{end}!")
        assert not writer.takes("grammar", grammar, f"{before}{end}{end}!")


def test_white_space_between_tokens_of_json(writer: BlindWriter) -> None:
    grammar = f"start: {lark.json_value({'type': 'array', 'items': {'enum': [1]}, 'maxItems': 2})}"
    for text in ("[]", "[1,1]", "[ 1 , 1 ]", "[\n  1,\n  1\n]"):
        assert writer.takes("grammar", grammar, text)
    for text in (" [1]", "[1] ", "[  1]", "[\n\n1]", f"[\n{' ' * 21}1]", "[1,1,1]"):
        assert not writer.takes("grammar", grammar, text)


def test_words_that_a_schema_may_not_have(writer: BlindWriter) -> None:
    schema = {"enum": [1], "not": {}}
    assert writer.write("grammar", f"start: {lark.json_value(schema, lenient=True)}", 0) == "1"
    with pytest.raises(GrammarError, match="not"):
        writer.write("grammar", f"start: {lark.json_value(schema)}", 0)


@pytest.mark.parametrize(
    ("grammar", "changed"),
    [
        ('start: "x" %json {"a": 1} "y" | %json  {"b": {}}', 'start: "x" %json {other} "y" | %json  {"b": {}}'),
        ('start: %json {"a": "}"}\nrest: %json {"a": 2}', "start: %json {other}\nrest: %json {other}"),
        ('start: "%json {\\"a\\": 1}" | /%json {"a": 1}\\//', None),
        ('start: "a" // %json {"a": 1}\n# %json {"a": 1}', None),
        ('start: "//" %json {"a": 1}', 'start: "//" %json {other}'),
        ('start: "\\"" %json {"b": 1}', None),
        ('start: </s> %json {"a": 1} </s>', "start: </s> %json {other} </s>"),
        ('start: /x %json {"a": 1}', None),
    ],
)
def test_other_schemas(grammar: str, changed: str | None) -> None:
    assert lark.with_schemas(grammar, lambda schema: "{other}" if '"a"' in schema else None) == changed


def test_broken_schemas() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        lark.with_schemas('start: %json {"a": }', lambda _: None)
