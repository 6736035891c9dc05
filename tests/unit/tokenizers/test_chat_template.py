from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from penstock.tokenizers import ANY_ROLE, ChatTemplate, ChatTemplateError, check_kwargs
from support.tokenizers import byte_level

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' ~ call.function.name ~ ' ' ~ call.function.arguments | tojson ~ '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {% generation %}{{- message.content or '' }}{% endgeneration %}
    {{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|header|>system<|end_header|>\\n\\n' }}
{%- if tools is not none %}
    {{- 'Environment: ipython\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|end_header|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\\n\\n' }}{% endif %}
"""

INST = """{{ bos_token }}
{%- set ns = namespace(system='', index=0) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = message['content'] + '\\n\\n' %}
        {%- continue %}
    {%- endif %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
        {{- '[INST] ' + ns.system + message['content'] + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST}

USER = {"role": "user", "content": " What is 1 < 2 & 'three'? ünï 🧿 "}
ASSISTANT = {"role": "assistant", "content": "It is  so. "}
SYSTEM = {"role": "system", "content": "Be brief. "}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "wetter", "description": "größe <x>", "parameters": {"type": "object"}}}
]

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "Why?"}],
    [USER, ASSISTANT],
    [USER, {"role": "assistant", "content": "Because"}],
    [SYSTEM, USER, {"role": "assistant", "content": "multi\nline\n"}],
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL_TOKENS)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("mode", ["plain", "add_generation_prompt", "continue_final_message"])
def test_same_text_as_transformers(
    theirs: Any, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, mode: str
) -> None:
    flags: dict[str, Any] = {"add_generation_prompt": False, **({} if mode == "plain" else {mode: True})}
    expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], tools=tools, tokenize=False, **flags)
    template = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
    assert template.render(messages, tools=tools, **flags) == expected


def test_tool_calls_as_transformers_renders_them(theirs: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"ort": "Köln", "n": [1, None]}}}
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    expected = theirs.apply_chat_template(messages, chat_template=CHATML, tokenize=False)
    assert "Köln" in expected
    assert ChatTemplate(CHATML, SPECIAL_TOKENS).render(messages, add_generation_prompt=False) == expected


def test_extra_variables_and_documents() -> None:
    template = ChatTemplate("{{ mood }}{% for d in documents %}{{ d.text }}{% endfor %}")
    text = template.render([USER], add_generation_prompt=False, extra={"mood": "ok"}, documents=[{"text": "D"}])
    assert text == "okD"
    thinking = ChatTemplate(CHATML).render([USER], add_generation_prompt=True, extra={"enable_thinking": False})
    assert thinking.endswith("<think>\n\n</think>\n\n")


def test_the_date() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}").render([USER], add_generation_prompt=False)
    assert abs(int(text) - datetime.now().year) <= 1


def test_the_final_message_may_be_a_list_of_parts() -> None:
    template = ChatTemplate("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}!{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]
    final = {"role": "assistant", "content": parts}
    assert template.render([final], add_generation_prompt=False, continue_final_message=True) == "ab "
    assert parts[1]["text"] == "b "


@pytest.mark.parametrize(
    "messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": []}], [{"role": "user", "content": 3}]]
)
def test_nothing_to_continue(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatTemplateError, match="no text to continue"):
        ChatTemplate(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(ChatTemplateError, match="leaves the final message out"):
        ChatTemplate("hi").render([ASSISTANT], add_generation_prompt=False, continue_final_message=True)


def test_continue_and_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        ChatTemplate(CHATML).render([ASSISTANT], add_generation_prompt=True, continue_final_message=True)


def test_the_template_can_refuse_the_messages() -> None:
    with pytest.raises(ChatTemplateError) as refused:
        ChatTemplate(INST, SPECIAL_TOKENS).render([ASSISTANT], add_generation_prompt=True)
    assert str(refused.value) == "Conversation roles must alternate user/assistant"
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('one\ntwo') }}", "^one$"),
        ("{{ raise_exception('') }}", "refused the messages"),
        ("{{ messages[9].content.x }}", "(?i)undefined|no element"),
        ("{{ 1 + 'a' }}", "failed: TypeError"),
        ("{{ nothing | tojson }}", "failed: TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    ],
)
def test_failures_are_one_line(source: str, message: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(ChatTemplateError, match=message) as failed:
        template.render([USER], add_generation_prompt=False)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ a b }}", "{% endfor %}", "{{ x | nofilter }}", "{{ '" + "(" * 500])
def test_invalid_templates_are_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="not valid Jinja: line 1"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "key",
    [
        *("chat_template", "tokenize", "tokenizer", "conversation", "messages", "tools", "documents", "bos_token"),
        *("add_generation_prompt", "continue_final_message", "raise_exception", "_x", "max_length"),
    ],
)
def test_requests_cannot_set_what_is_not_theirs(key: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"must not set '{key}'"):
        check_kwargs({"enable_thinking": True, key: 1})
    with pytest.raises(ChatTemplateError, match=f"must not set '{key}'"):
        ChatTemplate(CHATML).render([USER], add_generation_prompt=True, extra={key: 1})


def test_only_json_values_reach_the_template() -> None:
    with pytest.raises(ChatTemplateError, match="JSON values, not object"):
        ChatTemplate(CHATML).render([USER], add_generation_prompt=True, extra={"x": object()})
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        ChatTemplate(CHATML).render([USER], add_generation_prompt=True, extra={"x": deep})


def test_roles_that_a_template_reads():
    compared = (
        "{% for m in messages %}{% if m.role == 'document' %}{{ m.content }}{% elif m['role'] in ['tool', 'ipython'] %}"
        "{{ m.content }}{% elif m.role in ['system', 'platform'] %}{% elif m['role'] | lower == 'control' %}{% endif %}"
        "{% endfor %}"
    )
    assert ChatTemplate(compared).roles == {"document", "ipython", "control"}
    whatever = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    assert ChatTemplate(whatever).roles == {ANY_ROLE}
    assert ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}").roles == set()
    known = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role + m.content }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(known).roles == set()
    assert ChatTemplate(known, tool_use=compared).roles == {"document", "ipython", "control"}
