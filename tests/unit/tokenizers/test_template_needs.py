"""What rendering shows about a chat template, and the messages that it gets then."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tokenizers import ChatTemplate, ChatTemplateError, TemplateNeeds, chat
from support.chat_templates import TEMPLATES

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LEADING = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system comes first') }}{% endif %}"
ONE_SYSTEM = PLAIN.replace("[{{", LEADING + "[{{")
"""As of Qwen 3.5."""
LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor %}"
    "[system]{{ ns.system }}{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
"""As of DeepSeek R1: the last one wins."""
NO_SYSTEM = PLAIN.replace("[{{", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{")
SILENT_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
"""As of Phi 3: it leaves system messages out."""
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
GEMMA = NO_SYSTEM.replace("[{{", ALTERNATE + "[{{")
LLAMA = (
    "{% if messages[0].role == 'system' %}{% set turns, system = messages[1:], messages[0].content %}"
    "{% else %}{% set turns, system = messages, '' %}{% endif %}"
    "{% for m in turns %}" + ALTERNATE + "[{{ m.role }}]{% if loop.first and system %}<<{{ system }}>>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
"""As of Llama 2: the system's text is a part of the first user message."""
MISTRAL = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in turns if m.role != 'tool' and not m.tool_calls %}" + ALTERNATE + "{% endfor %}"
    "{% for m in turns %}{% if m.tool_calls %}[calls]{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ c.function | tojson }}#{{ c.id }}{% endfor %}"
    "{% elif m.role == 'tool' %}[result]{{ m.content }}#{{ m.tool_call_id }}"
    "{% elif m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}"
    "{% else %}{{ raise_exception('an unknown role') }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}{% endfor %}"
    "{% else %}{{ '[' + m.role + ']' + m.content }}{% endif %}{% endfor %}"
)
"""As of V3: arguments are text, and there are calls only where the content is none."""


def calls_as(text: str) -> str:
    """A template that shows the calls of a message by this text, and other messages by their content."""
    calls = "{% for c in m.tool_calls %}<" + text + ">{% endfor %}"
    return "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + calls + "{% endfor %}"


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(number: int = 1, content: str = "", count: int = 1, call_id: str = "call_") -> dict[str, Any]:
    """Its functions are `f1`, `f2`, ..., its ids `call_1`, `call_2`, ..."""
    calls = [
        {"id": f"{call_id}{n}", "type": "function", "function": {"name": f"f{n}", "arguments": {"city": "Köln"}}}
        for n in range(number, number + count)
    ]
    return say("assistant", content, tool_calls=calls)


def result(number: int = 1, content: str = "12 C", call_id: str = "call_") -> dict[str, Any]:
    return say("tool", content, tool_call_id=f"{call_id}{number}")


@functools.cache
def compiled(source: str, **fields: Any) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL_TOKENS, **fields)


def written(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    template = compiled(source)
    shaped = template.normalize(messages)
    return template.render(shaped, **{"add_generation_prompt": False, **fields})


def needs(source: str, **fields: Any) -> set[str]:
    found = compiled(source, **fields).needs
    return {name for name in TemplateNeeds.__dataclass_fields__ if getattr(found, name)}


CHAT = [say("system", "s"), say("user", "u"), say("assistant", "a"), say("user", "v")]
MIXED = [
    say("user", "u"),
    say("user", "v"),
    say("system", "s"),
    call(count=2),
    result(1),
    result(2),
    say("system", "t"),
]


@pytest.mark.parametrize("source", [PLAIN, *TEMPLATES.values(), calls_as("{{ c.function.name }} {{ c | tojson }}")])
def test_a_template_that_takes_everything_gets_it_as_it_is(source: str) -> None:
    template = ChatTemplate(source, SPECIAL_TOKENS)
    assert template.needs == TemplateNeeds()
    assert str(template.needs) == ""
    assert template.normalize(MIXED) == MIXED


@pytest.mark.parametrize("source", ["", "hi", "{{ 1 // 0 }}", "{{ raise_exception('never') }}", "{{ nothing.x.y }}"])
def test_a_template_that_shows_nothing_has_no_needs(source: str) -> None:
    assert needs(source) == set()


def test_a_template_that_never_ends_has_no_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "PROBE_TIME_LIMIT", 0.05)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert needs(LEADING.join(["{% for m in messages %}", endless + "{% endfor %}"])) == set()


def test_a_template_is_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(GEMMA)
    expected = template.normalize(CHAT)
    monkeypatch.setattr(chat, "find_needs", None)
    assert template.normalize(CHAT) == expected


ARGUMENTS = '{"city": "Köln"}'


@pytest.mark.parametrize(
    ("shown", "text", "expected"),
    [
        ("{{ '' + c.function.arguments }}", True, ARGUMENTS),
        ("{{ 'a' ~ c.function.arguments }}", True, "a" + ARGUMENTS),
        ("{{ c.function.arguments }}", True, ARGUMENTS),
        ("""{{ '"' + c.function.arguments + '"' }}""", True, f'"{ARGUMENTS}"'),
        ("{{ c.function.arguments | tojson }}", False, ARGUMENTS),
        ("{{ c.function | tojson }}", False, '{"name": "f1", "arguments": {"city": "Köln"}}'),
        ("{{ c.function }}", False, "{'name': 'f1', 'arguments': {'city': 'Köln'}}"),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", False, "city=Köln"),
        (
            "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
            "{{ c.function.arguments | tojson }}{% endif %}",
            False,
            ARGUMENTS,
        ),
        (
            "{% if c.function.arguments is not string %}{{ raise_exception('text, please') }}{% endif %}"
            "{{ c.function.arguments }}",
            True,
            ARGUMENTS,
        ),
    ],
)
@pytest.mark.parametrize("given", [{"city": "Köln"}, ARGUMENTS])
def test_arguments_come_in_the_form_that_the_template_takes(shown: str, text: bool, expected: str, given: Any) -> None:
    source = calls_as("{{ c.function.name }}|" + shown)
    assert needs(source) == ({"text_arguments"} if text else set())
    history = call()
    history["tool_calls"][0]["function"]["arguments"] = given
    assert written(source, [say("user", "q"), history]) == f"[user]q[assistant]<f1|{expected}>"


@pytest.mark.parametrize(
    ("given", "expected"), [("", "{}"), (None, "{}"), ({}, "{}"), ("{broken", "{broken"), ('{"a":1}', '{"a":1}')]
)
def test_arguments_as_text_are_what_the_model_wrote(given: Any, expected: str) -> None:
    history = call()
    history["tool_calls"][0]["function"]["arguments"] = given
    assert written(DEEPSEEK, [history]) == f"<call>f1 {expected}</call>"


CALLS = "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("test", "need", "shown"),
    [
        ("m.content is none", "none_content", "None"),
        ("m.content is not string", "none_content", "None"),
        ("'content' not in m", "absent_content", ""),
        ("not m.content", None, ""),
        ("m.content == ''", None, ""),
    ],
)
@pytest.mark.parametrize("empty", [{"content": ""}, {"content": None}, {}])
def test_content_beside_calls_is_empty_in_the_template_s_way(
    test: str, need: str | None, shown: str, empty: dict[str, Any]
) -> None:
    branch = "{% if m.tool_calls is defined and " + test + " %}({{ m.content }})" + CALLS
    source = "{% for m in messages %}" + branch + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    assert needs(source) - {"calls_apart"} == {need} - {None}
    history = {key: value for key, value in call().items() if key != "content"} | empty
    assert written(source, [history]).startswith(f'({shown}){{"name": "f1"')


def test_a_text_beside_calls_has_a_message_of_its_own_if_the_calls_would_be_lost() -> None:
    assert needs(DEEPSEEK) == {"text_arguments", "none_content", "calls_apart"}
    history = [say("user", "q"), call(1, "Let me see.", 2), result(1), result(2), say("user", "r")]
    calls = f"<call>f1 {ARGUMENTS}</call><call>f2 {ARGUMENTS}</call>"
    assert written(DEEPSEEK, history) == f"[user]q[assistant]Let me see.{calls}[tool]12 C[tool]12 C[user]r"
    on_purpose = calls_as("{{ c.function | tojson }}").replace(
        "{{ m.content }}", "{{ '' if m.tool_calls else m.content }}"
    )
    assert needs(on_purpose) == set(), "many templates leave out the text"


def test_ids_of_calls_are_short_where_they_have_to_be() -> None:
    assert "short_call_ids" in needs(MISTRAL)
    history = [
        say("user", "q"),
        call(count=2),
        result(1),
        result(2),
        call(3, call_id="a1b2c3d4"),
        result(3, "x", "a1b2c3d4"),
    ]
    text = written(MISTRAL, history)
    ids = [piece[:9] for piece in text.split("#")[1:]]
    assert ids[:2] == ids[2:4], "results name their calls"
    assert ids[4:] == ["a1b2c3d43"] * 2, "an id that fits stays"
    assert len(set(ids)) == 3
    assert all(each.isalnum() for each in ids)
    assert text == written(MISTRAL, history), "the next turn has the same ids"


def test_ids_of_calls_have_the_name_where_nothing_else_shows_it() -> None:
    kimi = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}{{ m.tool_call_id }}={% endif %}{{ m.content }}"
        "{% for c in m.tool_calls %}<{{ c.id }} {{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
    )
    assert needs(kimi) == {"named_call_ids"}
    own = call(3)
    own["tool_calls"][0]["id"] = "functions.f3:7"
    history = [call(count=2), result(2), own, say("tool", "7 C", tool_call_id="functions.f3:7")]
    assert written(kimi, history) == (
        f"[assistant]<functions.f1:0 {ARGUMENTS}><functions.f2:1 {ARGUMENTS}>[tool]functions.f2:1=12 C"
        f"[assistant]<functions.f3:7 {ARGUMENTS}>[tool]functions.f3:7=7 C"
    )


def test_results_have_the_tool_s_name_where_they_need_it() -> None:
    source = calls_as("{{ c.function | tojson }}").replace(
        "[{{ m.role }}]", "[{{ m.role }}]{% if m.role == 'tool' %}{{ m.name + ': ' }}{% endif %}"
    )
    assert needs(source) == {"tool_names"}
    history = [call(count=2), result(2), {**result(1), "name": "own"}]
    assert written(source, history).endswith("[tool]f2: 12 C[tool]own: 12 C")


def test_calls_come_one_by_one_where_a_message_may_have_one() -> None:
    source = calls_as("{{ c.function.name }} {{ c.function.arguments | tojson }}").replace(
        "[{{", "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}[{{"
    )
    assert needs(source) == {"single_calls"}
    history = [say("user", "q"), call(1, "Two.", 2), result(2, "b"), result(1, "a"), result(9, "c"), say("user", "r")]
    assert written(source, history) == (
        f"[user]q[assistant]Two.<f1 {ARGUMENTS}>[tool]a[assistant]<f2 {ARGUMENTS}>[tool]b[tool]c[user]r"
    )


LATE = [say("system", "s"), say("user", "u"), say("assistant", "a"), say("system", "t"), say("user", "v")]
BEHIND = [say("system", "s"), say("user", "u"), say("system", "t")]
LEADING_TWO = [say("system", "s"), say("system", "t"), say("user", "u")]


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (ONE_SYSTEM, LATE, "[system]s[user]u[assistant]a[user]t\n\nv"),
        (ONE_SYSTEM, BEHIND, "[system]s[user]u[user]t"),
        (ONE_SYSTEM, LEADING_TWO, "[system]s\n\nt[user]u"),
        (ONE_SYSTEM, [say("system", "s"), say("user", "u"), say("user", "v")], "[system]s[user]u[user]v"),
        (LAST_SYSTEM, LATE, "[system]s[user]u[assistant]a[user]t\n\nv"),
        (LAST_SYSTEM, LEADING_TWO, "[system]s\n\nt[user]u"),
        (NO_SYSTEM, LATE, "[user]s\n\nu[assistant]a[user]t\n\nv"),
        (NO_SYSTEM, BEHIND, "[user]s\n\nu[user]t"),
        (NO_SYSTEM, [say("system", "s"), say("assistant", "a")], "[user]s[assistant]a"),
        (NO_SYSTEM, [say("system", "s")], "[user]s"),
        (NO_SYSTEM, [say("system", ""), say("user", "u")], "[user]u"),
        (SILENT_SYSTEM, LATE, "[user]s\n\nu[assistant]a[user]t\n\nv"),
        (GEMMA, LATE, "[user]s\n\nu[assistant]a[user]t\n\nv"),
        (GEMMA, BEHIND, "[user]s\n\nu\n\nt"),
        (GEMMA, [say("assistant", "a"), say("user", "u")], "[user][assistant]a[user]u"),
        (GEMMA, [say("user", "u"), say("user", "v")], "[user]u\n\nv"),
        (GEMMA, [say("user", "u"), say("assistant", "a"), say("assistant", "b")], "[user]u[assistant]a\n\nb"),
        (GEMMA, [say("user", "u"), say("user", ""), say("system", "")], "[user]u"),
        (LLAMA, LATE, "[user]<<s>>u[assistant]a[user]t\n\nv"),
        (LLAMA, LEADING_TWO, "[user]<<s\n\nt>>u"),
        (LLAMA, [say("system", "s"), say("assistant", "a"), say("user", "u")], "[user]<<s>>[assistant]a[user]u"),
        (LLAMA, [say("system", "s")], "[user]<<s>>"),
        (MISTRAL, LATE, "[system]s[user]u[assistant]a[user]t\n\nv"),
    ],
)
def test_messages_are_in_the_places_that_the_template_has_for_them(
    source: str, messages: list[dict[str, Any]], expected: str
) -> None:
    assert written(source, messages) == expected


@pytest.mark.parametrize("source", [ONE_SYSTEM, LAST_SYSTEM, LLAMA, MISTRAL])
def test_a_chat_that_fits_stays_as_it_is(source: str) -> None:
    template = ChatTemplate(source)
    assert str(template.needs)
    assert template.normalize(CHAT) == CHAT


def test_only_what_the_template_refuses_is_joined() -> None:
    assert needs(ONE_SYSTEM) == {"joined_systems", "late_system_as_user"}
    no_twins = PLAIN.replace(
        "[{{",
        "{% if m.role == 'assistant' and messages[loop.index0 - 1].role == 'assistant' and not loop.first %}"
        "{{ raise_exception('once more?') }}{% endif %}[{{",
    )
    assert needs(no_twins) == {"joined_assistants"}
    assert needs(NO_SYSTEM) == {"no_system"}
    assert needs(GEMMA) == {"no_system", "joined_users", "joined_assistants", "user_first"}


def test_a_user_s_message_behind_a_result_gets_a_turn_between_them() -> None:
    assert "turns_around_calls" in needs(MISTRAL)
    history = [say("user", "q"), call(1, call_id="a1b2c3d4"), result(1, "r", "a1b2c3d4"), say("user", "stop")]
    calls = '[calls]{"name": "f1", "arguments": {"city": "Köln"}}#a1b2c3d41'
    assert written(MISTRAL, history) == f"[user]q{calls}[result]r#a1b2c3d41[assistant][user]stop"
    history[3:] = [say("system", "s"), say("user", "stop")]
    assert written(MISTRAL, history).endswith("[assistant][user]s\n\nstop")


def test_calls_stay_apart_from_the_message_before_them_unless_roles_alternate() -> None:
    history = [say("user", "q"), say("assistant", "hm"), call(), result(), say("assistant", "ok")]
    assert "[assistant]hm[calls]" in written(MISTRAL, history)
    strict = (
        "{% for m in messages %}" + ALTERNATE.replace("(m.role == 'user')", "(m.role in ('user', 'tool'))")
        + "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}<{{ c.function | tojson }}>{% endfor %}{% endfor %}"
    )  # fmt: skip
    assert {"joined_calls", "turns_around_calls"} <= needs(strict)
    assert written(strict, history).startswith('[user]q[assistant]hm<{"name": "f1"')


def test_a_template_that_needs_a_user_s_message_gets_one() -> None:
    source = (
        PLAIN
        + "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('') }}{% endif %}"
    )
    assert needs(source) == {"some_user"}
    assert written(source, [say("system", "s")]) == "[system]s[user]"
    assert written(source, [say("system", "s"), say("assistant", "a")]) == "[system]s[user][assistant]a"
    assert written(source, [say("assistant", "a"), say("user", "u")]) == "[assistant]a[user]u"


PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}({{ p.text or p.type }}){% endfor %}{% endif %}"
)
EITHER = "{% for m in messages %}" + CONTENT + "{% endfor %}"
FALSE_LOOP = (
    PLAIN.replace("{{ m.content }}", "{{ m.content + '' }}")
    + "{% set calls = messages[0].content %}{% for c in calls if c is mapping %}{{ c }}{% endfor %}"
)
"""As of Mistral Nemo: there is a loop over content, and yet content is text."""


def test_content_is_parts_or_text_as_the_template_takes_it() -> None:
    listed = say("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert needs(PARTS) == {"content_parts"}
    assert written(PARTS, [say("user", "u"), listed]) == "[user](u)[user](a)(b)"
    assert needs(EITHER) == set()
    assert written(EITHER, [say("user", "u"), listed]) == "u(a)(b)"
    assert needs(FALSE_LOOP) == {"content_text"}
    assert written(FALSE_LOOP, [say("user", "u"), listed]) == "[user]u[user]a\nb"
    assert needs(FALSE_LOOP, content_format="openai") == set(), "the operator knows better"
    gemma = "{{ messages[0].content[0].text if messages[0].role == 'system' }}" + EITHER.replace(
        " in messages %}", " in messages if m.role != 'system' %}"
    )
    assert "content_parts" in needs(gemma)
    assert "no_system" not in needs(gemma)
    assert written(gemma, [say("system", "s"), say("user", "u")]) == "s(u)"


def test_joined_messages_have_all_parts_and_thoughts() -> None:
    image = {"type": "image", "url": "x"}
    first = say("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], name="Ann")
    source = GEMMA.replace("{{ m.content }}", CONTENT)
    template = ChatTemplate(source)
    assert template.normalize([first, say("user", "c", name="Bob")]) == [say("user", "a\nb\n\nc")]
    assert (
        written(source, [say("user", "c"), say("user", [image]), say("user", "d")]) == "[user](c)(\n\n)(image)(\n\n)(d)"
    )
    thoughts = [
        say("assistant", "a", reasoning_content="x"),
        say("assistant", "b", reasoning="y"),
        say("assistant", "c"),
    ]
    (joined,) = template.normalize([say("user", "u"), *thoughts])[1:]
    assert (joined["content"], joined["reasoning_content"], joined["thinking"]) == ("a\n\nb\n\nc", "x\n\ny", "x\n\ny")


def test_a_joined_message_can_be_continued() -> None:
    messages = [say("system", "s"), say("user", "u"), say("assistant", "a"), say("assistant", "b")]
    assert written(GEMMA, messages, continue_final_message=True) == "[user]s\n\nu[assistant]a\n\nb"


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any order of roles. Each text and each function has a name of its own, in the order of the messages."""
    messages: list[dict[str, Any]] = []
    for number, kind in enumerate(
        draw(st.lists(st.sampled_from(("system", "user", "assistant", "call")), min_size=1, max_size=8)), 1
    ):
        if kind == "call":
            messages += [
                call(10 * number, count=2),
                result(10 * number, f"r{number}."),
                result(10 * number + 1, f"q{number}."),
            ]
        else:
            messages.append(say(kind, f"{kind[0]}{number}."))
    return messages


@pytest.mark.parametrize("source", [MISTRAL, DEEPSEEK, ONE_SYSTEM, NO_SYSTEM])
@given(messages=conversations())
def test_nothing_is_lost_and_nothing_gains_authority(source: str, messages: list[dict[str, Any]]) -> None:
    template = compiled(source)
    shaped = template.normalize(messages)
    allowed = {"s": ("system", "user"), "u": ("user",), "a": ("assistant",), "r": ("tool",), "q": ("tool",)}
    texts = [(message["role"], text) for message in shaped for text in (message["content"] or "").split("\n\n") if text]
    assert [text for _, text in texts] == [message["content"] for message in messages if message["content"]]
    assert all(role in allowed[text[0]] for role, text in texts)
    called = [each["function"]["name"] for message in shaped for each in message.get("tool_calls", ())]
    assert called == [each["function"]["name"] for message in messages for each in message.get("tool_calls", ())]
    assert template.render(shaped, add_generation_prompt=True)


@pytest.mark.parametrize("source", [GEMMA, LLAMA])
@given(roles=st.lists(st.sampled_from(("system", "user", "assistant")), min_size=1, max_size=8))
def test_any_order_of_roles_alternates(source: str, roles: list[str]) -> None:
    messages = [say(role, f"{role[0]}{number}.") for number, role in enumerate(roles)]
    template = compiled(source)
    text = template.render(template.normalize(messages), add_generation_prompt=True)
    places = [text.index(message["content"]) for message in messages]
    assert places == sorted(places)


def test_the_messages_of_the_caller_stay_as_they_are() -> None:
    messages = [*LATE, call(1, "x", 2), result(1), say("user", "w")]
    before = json.dumps(messages)
    for source in (MISTRAL, DEEPSEEK, GEMMA):
        ChatTemplate(source).normalize(messages)
    assert json.dumps(messages) == before


def test_a_template_for_tools_is_chosen_by_the_chat_and_tried_out_with_tools() -> None:
    hermes = (
        "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
        "{% if m.role == 'tool' %}{{ m.name + ':' }}{% endif %}{{ m.content }}{{ mood }}"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    rag = "{{ documents | tojson }}"
    template = ChatTemplate(ONE_SYSTEM, tool_use=hermes, rag=rag)
    tools, documents = [{"type": "function", "function": {"name": "f"}}], [{"text": "d"}]
    assert template.choose(None, None) is template
    assert template.choose([], []) is template
    assert template.choose(tools, None).source == template.with_tools.source == hermes
    assert template.choose(None, documents).source == rag
    assert template.variables >= {"tools", "documents", "mood"}
    with pytest.raises(ChatTemplateError, match="template for tools does not use documents"):
        template.choose(tools, documents)
    assert list(template.by_name) == ["default", "tool_use", "rag"]
    assert template.with_tools.needs == TemplateNeeds(tool_names=True)
    assert needs(hermes) == {"tool_names"}, "the only template of a model, whatever its name"
    plain = ChatTemplate(PLAIN)
    assert plain.choose(tools, documents) is plain.with_tools is plain


def test_needs_are_told_in_words() -> None:
    words = [str(TemplateNeeds(**{name: True})) for name in TemplateNeeds.__dataclass_fields__]
    assert all(words)
    assert len(set(words)) == len(words)
    assert str(TemplateNeeds(text_arguments=True, some_user=True)) == "; ".join(
        itertools.chain([words[2]], [str(TemplateNeeds(some_user=True))])
    )
