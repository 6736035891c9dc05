"""What models write, by parser: the end of the prompt, the text, and what is found in it."""

from __future__ import annotations

from support.parsers import Found

_CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'

EXAMPLES: dict[str, list[tuple[str, str, Found]]] = {
    "deepseek_r1": [
        ("", "Hm, 4.\n</think>\n\nIt is 4.", Found("It is 4.", reasoning="Hm, 4.\n")),
        ("", "<think>\nHm.</think>4", Found("4", reasoning="Hm.")),
        ("<｜Assistant｜><think>\n", "Hm.</think>4", Found("4", reasoning="Hm.")),
        ("<｜Assistant｜></think>", "4 </think> 5", Found("4 </think> 5")),
        ("", "cut o", Found(reasoning="cut o")),
        ("", "Hm.</thin", Found(reasoning="Hm.</thin")),
        ("", "I call it.<｜tool▁calls▁begin｜>x", Found("<｜tool▁calls▁begin｜>x", reasoning="I call it.")),
        ("", "a</think>b<think>c</think>d", Found("b<think>c</think>d", reasoning="a")),
    ],
    "qwen3": [
        ("", "<think>\nHm.\n</think>\n\nIt is 4.", Found("It is 4.", reasoning="Hm.\n")),
        ("", "It is 4 <think>, right?", Found("It is 4 <think>, right?")),
        ("<|im_start|>assistant\n<think>\n", "Hm.</think>4", Found("4", reasoning="Hm.")),
        ("<think>\n\n</think>\n\n", "<think>4", Found("<think>4")),
        ("", "<think>Look.\n<tool_call>{}", Found("<tool_call>{}", reasoning="Look.\n")),
        ("", "<think>\n\n</think>\n\n4", Found("4")),
    ],
    "glm45": [("", "<think>Hm.</think>\n4", Found("4", reasoning="Hm."))],
    "kimi_k2": [
        ("", "<think>Hm.<|tool_calls_section_begin|>", Found("<|tool_calls_section_begin|>", reasoning="Hm.")),
    ],
    "minimax": [
        ("", "Hm.</think>4", Found("4", reasoning="Hm.")),
        ("]~b]ai\n<think>\n", "Hm.<minimax:tool_call>", Found("<minimax:tool_call>", reasoning="Hm.")),
    ],
    "mistral": [("", "[THINK]Hm.[/THINK]4[THINK]", Found("4[THINK]", reasoning="Hm."))],
    "gemma4": [
        ("", "<|channel>thought\nHm.<channel|>4", Found("4", reasoning="Hm.")),
        ("", "<|channel>final", Found("<|channel>final")),
    ],
    "granite": [
        (
            "",
            "Here is my thought process:\nHm. Here is more.\n\nHere is my response: 4",
            Found("4", reasoning="Hm. Here is more.\n\n"),
        ),
        ("", "Here's my thought process: Hm. Here's my response: 4", Found("4", reasoning="Hm. ")),
        ("", "Here is my answer: 4", Found("Here is my answer: 4")),
    ],
    "think": [
        ("", "a<think>b</think>c<think>d", Found("ac", reasoning="bd")),
        ("<think>", "b</think> c", Found("c", reasoning="b")),
        ("</think>", "c<think>d", Found("c", reasoning="d")),
    ],
    "gpt_oss": [
        (
            "",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            Found("4", reasoning="Hm."),
        ),
        (
            "",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me look."
            "<|end|>" + _CALL,
            Found("Let me look." + _CALL, reasoning="Hm."),
        ),
        ("", " to=functions.f" + _CALL[18:], Found(" to=functions.f" + _CALL[18:])),
        ("", "<|channel|>analysis<|message|>Hm.<|start|>assistant", Found("<|start|>assistant", reasoning="Hm.")),
        ("", "<|channel|>analy", Found("<|channel|>analy")),
        ("", "<|channel|>final <|constrain|>json<|message|>{}", Found("{}")),
        ("", "4", Found("4")),
    ],
}
