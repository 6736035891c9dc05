"""What models write, by parser: the text, and what is found in it."""

from __future__ import annotations

from support.parsers import Call, Found

OSLO = '{"city": "Oslo"}'
BOTH = [Call("weather", OSLO), Call("clock", "{}")]

_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def _deepseek_v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def _kimi(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

EXAMPLES: dict[str, list[tuple[str, Found]]] = {
    "hermes": [
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
            Found(calls=BOTH),
        ),
        (
            'Let me look.\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>\n\nDone.',
            Found("Let me look.\n\n\nDone.", BOTH[:1]),
        ),
        # the name comes last, braces and quotes stand in strings, the tool is not known
        (
            r'<tool_call>{"arguments": {"a": "}\"{", "b": [{}]}, "name": "other"}</tool_call>',
            Found(calls=[Call("other", r'{"a": "}\"{", "b": [{}]}')]),
        ),
        ('<tool_call>{"name": "clock"}</tool_call>', Found(calls=[Call("clock", "{}")])),
        ('<tool_call>{"name": "clock"}</tool_call>\n\n', Found(calls=[Call("clock", "{}")])),
        ('<tool_call>{"name": "clock", "arguments": null}</tool_call>', Found(calls=[Call("clock", "{}")])),
        ('<tool_call>{"id": "c1", "name": "clock"}</tool_call>', Found(calls=[Call("clock", "{}", "c1")])),
        (
            r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>',
            Found(calls=BOTH[:1]),
        ),
        ('<tool_call>{"name": "w\\u00fc", "arguments": {}}</tool_call>', Found(calls=[Call("wü", "{}")])),
        # cut off: in the arguments, in the name, in the tag
        ('<tool_call>{"name": "weather", "arguments": {"city": "Os', Found(calls=[Call("weather", '{"city": "Os')])),
        ('<tool_call>{"name": "weat', Found('<tool_call>{"name": "weat')),
        ("a <tool_c", Found("a <tool_c")),
        # no calls
        ("<tool_call>\nmore <b>text</b>", Found("<tool_call>\nmore <b>text</b>")),
        ('<tool_call>{"name": 3}</tool_call>', Found('<tool_call>{"name": 3}</tool_call>')),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', Found('<tool_call>{"name": "\\ud800"}</tool_call>')),
        ("</tool_call>", Found("</tool_call>")),
        # the closing is missing, or the arguments end too early
        ('<tool_call>{"name": "clock"}<tool_call>{"name": "clock"}', Found(calls=BOTH[1:] * 2)),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"</tool_call> b',
            Found(" b", [Call("weather", '{"city": "Oslo"')]),
        ),
        ('<tool_call><tool_call>{"name": "clock"}</tool_call>', Found("<tool_call>", BOTH[1:])),
    ],
    "granite": [
        (
            '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]',
            Found(calls=BOTH),
        ),
        ('<tool_call> [{"name": "weather", "arguments": {"city": "Oslo"}}]', Found(calls=BOTH[:1])),
        ('<tool_call>{"name": "clock", "arguments": {}}</tool_call>', Found(calls=BOTH[1:])),
        ('<function_call> {"name": "clock", "arguments": {}}', Found(calls=BOTH[1:])),
        ("<|tool_call|>[]", Found("<|tool_call|>[]")),
        ('<tool_call>[{"name": "clock"}, 3] x', Found(", 3] x", BOTH[1:])),
    ],
    "phi4_mini_json": [
        (
            'functools[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "parameters": {}}]',
            Found(calls=BOTH),
        ),
        ('<|tool_call|>[{"name": "clock"}]<|/tool_call|>', Found(calls=BOTH[1:])),
        ("functools is a module", Found("functools is a module")),
    ],
    "llama3_json": [
        ('{"name": "weather", "parameters": {"city": "Oslo"}}', Found(calls=BOTH[:1])),
        (
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "clock", "parameters": {}}',
            Found(calls=BOTH),
        ),
        ('{"type": "function", "name": "clock", "parameters": {}}', Found(calls=BOTH[1:])),
        ('{"parameters": {}, "name": "clock"}', Found(calls=BOTH[1:])),
        ('<|python_tag|>{"name": "other", "parameters": {}}', Found(calls=[Call("other", "{}")])),
        ('{"name": "other", "parameters": {}}', Found('{"name": "other", "parameters": {}}')),
        ('{"name": "clock", "age": 3}', Found('{"name": "clock", "age": 3}')),
        ('{"name": "clock"}', Found('{"name": "clock"}')),
        ('It is {"name": "clock", "parameters": {}}', Found('It is {"name": "clock", "parameters": {}}')),
        ('{"name": "clock", "parameters": {}}; and more', Found("; and more", BOTH[1:])),
        ("<|python_tag|>print(1)", Found("<|python_tag|>print(1)")),
    ],
    "pythonic": [
        ('[weather(city="Oslo"), clock()]', Found(calls=BOTH)),
        (
            "[weather(city='it\\'s \"O\\u00e4\"\\n', days=-3, wind=True, level=None, place={'a': [1.5, ('x',)]})]",
            Found(
                calls=[
                    Call(
                        "weather",
                        '{"city": "it\'s \\"Oä\\"\\n", "days": -3, "wind": true, "level": null, '
                        '"place": {"a": [1.5, ["x"]]}}',
                    )
                ]
            ),
        ),
        ('<|python_start|>[other.one(a="""x"y""",)]<|python_end|>', Found(calls=[Call("other.one", '{"a": "x\\"y"}')])),
        ("[clock(), other(a=1)]", Found(calls=[Call("clock", "{}"), Call("other", '{"a": 1}')])),
        ("[other(a=1)]", Found("[other(a=1)]")),
        ("[1, 2, 3]", Found("[1, 2, 3]")),
        ("[weather](http://x)", Found("[weather](http://x)")),
        ("[clock(), weather(1)]", Found(", weather(1)]", BOTH[1:])),
        ("[weather(days=1+2)]", Found("[weather(days=1+2)]")),
        ('[weather(city="Os', Found('[weather(city="Os')),
        ("See [clock()]", Found("See [clock()]")),
        ("[clock()] and so on", Found(" and so on", BOTH[1:])),
    ],
    "mistral": [
        (
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]',
            Found(calls=BOTH),
        ),
        ('[TOOL_CALLS] {"name": "clock", "arguments": {}}', Found(calls=BOTH[1:])),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock[ARGS]{}', Found(calls=BOTH)),
        ('[TOOL_CALLS]weather{"city": "Oslo"}', Found(calls=BOTH[:1])),
        ("a[TOOL_CALLS]clock[CALL_ID]abc123def[ARGS]{}", Found("a", [Call("clock", "{}", "abc123def")])),
        ('[TOOL_CALLS]weather[ARGS]{"city": "O', Found(calls=[Call("weather", '{"city": "O')])),
        ("[TOOL_CALLS] is a token", Found("[TOOL_CALLS] is a token")),
    ],
    "deepseek_v3": [
        (
            _DEEPSEEK_BEGIN
            + _deepseek_v3("weather", OSLO)
            + "\n"
            + _deepseek_v3("clock", "{}")
            + _DEEPSEEK_END
            + "<｜end▁of▁sentence｜>",
            Found("<｜end▁of▁sentence｜>", BOTH),
        ),
        ("Yes. " + _deepseek_v3("clock", "{}"), Found("Yes. ", BOTH[1:])),
        ("<｜tool▁call▁begin｜>function", Found("<｜tool▁call▁begin｜>function")),
        ("<｜tool▁calls▁begin｜>x", Found("<｜tool▁calls▁begin｜>x")),
    ],
    "deepseek_v31": [
        (
            _DEEPSEEK_BEGIN + _deepseek_v31("weather", OSLO) + _deepseek_v31("clock", "{}") + _DEEPSEEK_END,
            Found(calls=BOTH),
        ),
        (_deepseek_v31("clock", ""), Found(calls=BOTH[1:])),
        (_deepseek_v31("weather", OSLO).partition("lo")[0], Found(calls=[Call("weather", '{"city": "Os')])),
        ("<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}", Found("<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}")),
    ],
    "kimi_k2": [
        (
            _KIMI_BEGIN + _kimi("weather", 0, OSLO) + _kimi("clock", 1, "{}") + _KIMI_END,
            Found(calls=[Call("weather", OSLO, "functions.weather:0"), Call("clock", "{}", "functions.clock:1")]),
        ),
        (_KIMI_BEGIN + _KIMI_END, Found(_KIMI_BEGIN + _KIMI_END)),
    ],
    "glm45": [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n<tool_call>clock</tool_call>",
            Found(calls=[Call("weather", '{"city": "12", "days": 12}'), Call("clock", "{}")]),
        ),
        (
            "<tool_call>other<arg_key>a</arg_key><arg_value>[1, 2]</arg_value>"
            "<arg_key>b</arg_key><arg_value>x\ny</arg_value></tool_call>",
            Found(calls=[Call("other", '{"a": [1, 2], "b": "x\\ny"}')]),
        ),
        (
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Os",
            Found(calls=[Call("weather", '{"city": "Os')]),
        ),
        ("<tool_call>weather and more", Found("<tool_call>weather and more")),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
            Found(calls=BOTH),
        ),
        (
            '<tool_call>\n<function=weather>\n<parameter=city>\n\n3 "<b>"\n\n</parameter>\n<parameter=days>\n3\n'
            "</parameter>\n<parameter=wind>\nTrue\n</parameter>\n<parameter=place>\n{'a': None}\n</parameter>\n"
            "<parameter=level>\nnull\n</parameter>\n<parameter=days>\nmany\n</parameter>\n</function>\n</tool_call>",
            Found(
                calls=[
                    Call(
                        "weather",
                        '{"city": "\\n3 \\"<b>\\"\\n", "days": 3, "wind": true, "place": {"a": null}, '
                        '"level": null, "days": "many"}',
                    )
                ]
            ),
        ),
        # without the section only what names a tool is a call
        ("<function=clock></function></tool_call>", Found(calls=BOTH[1:])),
        ("<function=other></function>", Found("<function=other></function>")),
        (
            "<tool_call><function=clock></function>\n<function=other></function></tool_call>",
            Found(calls=[Call("clock", "{}"), Call("other", "{}")]),
        ),
        # a closing is missing
        (
            "<tool_call><function=weather><parameter=city>Oslo<parameter=days>3</function>",
            Found(calls=[Call("weather", '{"city": "Oslo", "days": 3}')]),
        ),
        ("<tool_call><function=weather><parameter=city>\nOs", Found(calls=[Call("weather", '{"city": "Os')])),
        ("<tool_call><function=weather><parameter=days>12", Found(calls=[Call("weather", "")])),
        ("<tool_call>\nno call", Found("<tool_call>\nno call")),
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
            '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
            Found(calls=BOTH),
        ),
        ("<invoke name=clock></invoke>", Found(calls=BOTH[1:])),
        ('<invoke name="other"></invoke>', Found('<invoke name="other"></invoke>')),
        (
            '<minimax:tool_call><invoke name="weather"><parameter name="city"> a\n</parameter>',
            Found(calls=[Call("weather", '{"city": " a\\n"')]),
        ),
    ],
    "gemma": [
        (
            "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>"
            "<start_function_call>call:clock{}<end_function_call>",
            Found(calls=BOTH),
        ),
        (
            '<|tool_call>call:weather{city:<|"|>a "b", {c}<|"|>,days:3,place:{x:[true,<|"|>y<|"|>]},level:far}'
            "<tool_call|>",
            Found(
                calls=[
                    Call(
                        "weather",
                        '{"city": "a \\"b\\", {c}", "days": 3, "place": {"x": [true, "y"]}, "level": "far"}',
                    )
                ]
            ),
        ),
        ("<start_function_call>call:weather{city:", Found("<start_function_call>call:weather{city:")),
        ("<|tool_call>hello", Found("<|tool_call>hello")),
    ],
    "gpt_oss": [
        (
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + OSLO + "<|call|>",
            Found(calls=BOTH[:1]),
        ),
        (" to=functions.clock<|channel|>commentary json<|message|>{}<|call|>", Found(calls=BOTH[1:])),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.weather<|channel|>analysis"
            "<|constrain|>json<|message|>" + OSLO + "<|end|><|start|>assistant<|channel|>commentary to=clock<|message|>"
            "{}",
            Found("<|channel|>analysis<|message|>Hm.<|end|>", BOTH),
        ),
        (
            "<|channel|>commentary to=functions.weather<|message|>{",
            Found(calls=[Call("weather", "{")]),
        ),
        (
            "<|channel|>analysis to=python<|message|>1+1<|call|>",
            Found("<|channel|>analysis to=python<|message|>1+1<|call|>"),
        ),
        (" to=be or not", Found(" to=be or not")),
    ],
}
