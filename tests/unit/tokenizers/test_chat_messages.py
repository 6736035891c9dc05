from __future__ import annotations

from typing import Any

import pytest

from penstock.tokenizers import ChatTemplate, ChatTemplateError, content_format, normalize_messages


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for t in m.content.split('x') %}{{ t }}{% endfor %}{% endfor %}", "string"),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% for p in m.content | selectattr('text') %}{{ p }}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c[1:] %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% macro show(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            "openai",
        ),
    ],
)
def test_content_format(source: str, expected: str) -> None:
    assert content_format(source) == expected
    assert ChatTemplate(source).content_format == expected


def test_content_format_of_an_invalid_template() -> None:
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        content_format("{% if %}")


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [
        "a",
        {"type": "text", "text": "b"},
        {"type": "input_text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
    ]
    message = {"role": "user", "content": parts, "name": None}
    assert normalize_messages([message]) == [{"role": "user", "content": "a\nb\nc\nd"}]
    assert message["content"] is parts


def test_parts_stay_where_the_template_reads_them() -> None:
    parts = [{"type": "output_text", "text": "a", "annotations": []}, {"type": "image_url", "image_url": {"url": "u"}}]
    (message,) = normalize_messages([{"role": "user", "content": parts}], "openai")
    assert message["content"] == [{"type": "text", "text": "a"}, parts[1]]
    (message,) = normalize_messages([{"role": "user", "content": "a"}], "openai")
    assert message["content"] == "a"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, "ü"]}', {"a": [1, "ü"]}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_of_tool_calls_become_objects(arguments: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "index": None, "function": {"name": "f", "arguments": arguments}}
    (message,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == "", "as it is from every API"
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": expected}}]
    assert call["function"]["arguments"] == arguments  # type: ignore[index]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_by_the_names_templates_read(name: str) -> None:
    (message,) = normalize_messages([{"role": "assistant", "content": "a", name: "r"}])
    assert message["reasoning_content"] == "r"
    assert message["thinking"] == "r"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", r"messages\[1\] must be an object"),
        ({"content": "x"}, r"messages\[1\] has no role"),
        ({"role": "user", "content": 3}, r"messages\[1\].content must be a string or a list"),
        ({"role": "user", "content": [3]}, r"content\[0\] must be an object with a type"),
        ({"role": "user", "content": [{"text": "x"}]}, r"content\[0\] must be an object with a type"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\] has no text"),
        ({"role": "user", "content": ["a", {"type": "image_url"}]}, r"content\[1\]: this model takes no .*'image_url'"),
        ({"role": "assistant", "tool_calls": "x"}, r"tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [1]}, r"tool_calls\[0\] must be an object"),
    ],
)
def test_other_shapes_are_refused(message: Any, error: str) -> None:
    with pytest.raises(ChatTemplateError, match=error):
        normalize_messages([{"role": "user", "content": "ok"}, message])


def test_content_format_of_a_template_that_is_nested_too_deeply() -> None:
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        content_format("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}")
