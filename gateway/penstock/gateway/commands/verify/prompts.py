"""The built-in conversations, tools, schemas and texts."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def question(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


QUESTIONS = (
    "What does os.path.join do?",
    "How do I sort a list in Python?",
    "Hello! Who are you?",
    "Which module reads and writes JSON?",
    "What is the difference between a list and a tuple?",
    "What is the capital of France?",
    "How do I read a text file line by line?",
    "Answer with one word: is the sky blue?",
)
"""Each has a short answer, so that a model that ends its turns ends within the limit."""

TEXT_BEGINNINGS = (
    "The json module of Python's standard library",
    "To open a file for reading, call",
    "def add(a, b):\n    return",
    "The first month of the year is",
)
"""For models that do not chat; and what is compared with transformers, which needs no chat template."""


def _tool(name: str, description: str, required: dict[str, Any], optional: dict[str, Any] | None = None) -> Message:
    parameters = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}
WEATHER = _tool("get_weather", "Get the weather in a city.", {"city": _TEXT})
_TIMER = _tool("set_timer", "Start a timer.", {"minutes": _WHOLE})
_SEARCH = _tool("search_files", "Search the files for a text.", {"query": _TEXT})
_TRANSLATE = _tool("translate", "Translate a word.", {"word": _TEXT, "language": _TEXT})
_ADD = _tool("add_numbers", "Add two numbers.", {"a": _WHOLE, "b": _WHOLE})

CALLS: tuple[tuple[Message, str, dict[str, Any]], ...] = (
    (WEATHER, "What is the weather in Oslo?", {"city": "Oslo"}),
    (_TIMER, "Set a timer for 5 minutes.", {"minutes": 5}),
    (_SEARCH, "Search the files for budget.", {"query": "budget"}),
    (_TRANSLATE, "Translate the word bread into French.", {"word": "bread", "language": "French"}),
    (_ADD, "Add the numbers 12 and 30.", {"a": 12, "b": 30}),
    (WEATHER, "How is the weather in Lima?", {"city": "Lima"}),
    (_TIMER, "Start a timer of 20 minutes.", {"minutes": 20}),
    (_SEARCH, "Find the files that contain the word invoice.", {"query": "invoice"}),
    (_TRANSLATE, "Translate water into German.", {"word": "water", "language": "German"}),
    (_ADD, "What is 7 plus 8? Use the tool.", {"a": 7, "b": 8}),
    (WEATHER, "Please get the weather in Paris for me.", {"city": "Paris"}),
    (_TIMER, "I need a timer for 90 minutes.", {"minutes": 90}),
    (_SEARCH, "Search for holiday in my files.", {"query": "holiday"}),
    (_TRANSLATE, "How do you say apple in Spanish?", {"word": "apple", "language": "Spanish"}),
    (_ADD, "Add 100 and 250.", {"a": 100, "b": 250}),
    (WEATHER, "Is it raining in Dublin?", {"city": "Dublin"}),
    (_TIMER, "Set a timer to 3 minutes, please.", {"minutes": 3}),
    (_SEARCH, "Look for the text garden in the files.", {"query": "garden"}),
    (_TRANSLATE, "Translate the word house into Italian.", {"word": "house", "language": "Italian"}),
    (_ADD, "Add 4 and 9.", {"a": 4, "b": 9}),
    (WEATHER, "Tell me the weather in Cairo.", {"city": "Cairo"}),
    (_TIMER, "Start a timer for 15 minutes.", {"minutes": 15}),
    (_SEARCH, "Which files contain the word password? Search for it.", {"query": "password"}),
    (_TRANSLATE, "Translate dog into Polish.", {"word": "dog", "language": "Polish"}),
    (_ADD, "Add the numbers 55 and 45.", {"a": 55, "b": 45}),
)
"""A tool, a question that clearly asks for it, and the arguments that fit. Tools take turns, so that the first five
prompts have all of them."""


def _object(**properties: Any) -> Message:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_SHORT = {"type": "string", "maxLength": 40}
_PERSON = _object(name=_SHORT, age={"type": "integer", "minimum": 0, "maximum": 120})
_CITY = _object(city=_SHORT, country=_SHORT)
_TASK = _object(title=_SHORT, done={"type": "boolean"}, priority={"enum": ["low", "normal", "high"]})
_LISTED = _object(items={"type": "array", "items": _SHORT, "minItems": 1, "maxItems": 3})
_NESTED = _object(product=_object(name=_SHORT, price={"type": "number"}), in_stock={"type": "boolean"})

JSON_ANSWERS: tuple[tuple[Message | None, str], ...] = (
    (_PERSON, "Ada is 36 years old. Answer in JSON with name and age."),
    (_CITY, "Oslo is in Norway. Answer in JSON with city and country."),
    (_TASK, "The task is to water the plants; it is not done, and urgent. Answer in JSON."),
    (_LISTED, "List up to three colours, in JSON."),
    (_NESTED, "A lamp costs 19.5 and is in stock. Answer in JSON."),
    (None, "Describe a book in a small JSON object with title and pages."),
    (_PERSON, "Tom turned 8 yesterday. Answer in JSON with name and age."),
    (_CITY, "I live in Lyon, in France. Answer in JSON with city and country."),
    (_TASK, "I have paid the rent already. Answer in JSON."),
    (_LISTED, "Name two kinds of fruit, in JSON."),
    (_NESTED, "The chair for 40 is sold out. Answer in JSON."),
    (None, "Write a JSON object with the key answer and the value 42."),
    (_PERSON, "Who is 70? It is Maria. Answer in JSON with name and age."),
    (_CITY, "Kyoto is an old city in Japan. Answer in JSON with city and country."),
    (_TASK, "Someday I should sort my photos. Answer in JSON."),
    (_LISTED, "Which days make a weekend? Answer in JSON."),
    (_NESTED, "There are many pens, at 2 each. Answer in JSON."),
    (None, "Write a JSON object about a dog with name and age."),
    (_PERSON, "The oldest of us, Ben, is 51. Answer in JSON with name and age."),
    (_CITY, "She flew to Quito, in Ecuador. Answer in JSON with city and country."),
    (_TASK, "Call the bank today, it is important! Answer in JSON."),
    (_LISTED, "List one or two metals, in JSON."),
    (_NESTED, "A used bicycle for 120.75 is still there. Answer in JSON."),
    (None, "Write an empty JSON object."),
    (None, "Write a JSON object with a list of two numbers."),
)
"""A schema, or None for any object, and a prompt."""

ROUND_TRIPS = (
    "Hello, world! It's 9:41 -- isn't it? (Yes; no: maybe.) 100% of $5.00 & more @ home #1 [a] {b} <c> ~ ^ \\ | / _ *",
    "Grüße aus Köln, naïve café, Ærøskøbing, Łódź, Αθήνα, Москва, שלום, مرحبا, नमस्ते",
    "日本語のテキスト、中文文本。한국어 ภาษาไทย",
    "😀 👩\u200d👩\u200d👧 🇳🇴 👍🏽 ✈\ufe0f ∑ √2 ≠ ½ € … “quotes” – — ‰",
    "two  spaces,   three,        eight, a tab\tand\t\ttwo, lines\n\n\nwith gaps \n and trailing space \n",
    'def f(x: int = 0) -> str:\n    if x >= 1_000:\n\treturn f"{x!r:>10}\\n"\n    return None  # 0x1F, 1e-5\n',
    '{"key": ["value", null, true, -1.5e+10], "path": "C:\\\\temp\\\\new.txt", "url": "https://example.com/?q=a%20b#c"}',
    "<|im_strat|> <|end|of|text|> <s >  [INST without end  <tool_cal> </thinking> <|",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1234567890123456789012345678901234567890",
)
"""Each comes back from any tokenizer that can write all texts. The first one is ASCII."""
