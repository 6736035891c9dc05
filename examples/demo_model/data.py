"""Data recipe of the demo model: conversations made from the docstrings of Python's standard library.

`Recipe(seed)` yields examples for ever.  An example is a list of (text, trained) pieces; the special
tokens <|im_start|>, <|im_end|> and <|endoftext|> appear in the pieces as text.  Run as a script, this
file prints a few examples.
"""

from __future__ import annotations

import importlib
import inspect
import pydoc_data.topics
import random
import re
import sys
import tomllib
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import JsonRecipe, ToolRecipe, Values, call_text, system_text

HERE = Path(__file__).parent
Piece = tuple[str, bool]

# Base forms of the verbs with which docstrings begin ("Return the ..." becomes "returns the ...").
VERB_WORDS = """abort accept add adapt allow announce append apply arrange ask assign associate attach bind
    build
    calculate call cancel cast change check choose clean clear close collapse combine compare compile
    compose compress compute configure connect construct convert copy count create decode decompress
    define delete describe deserialize detach determine disable disassemble discard display divide do
    drop dump duplicate emit enable encode ensure enter escape estimate evaluate execute exit expand
    extend extract feed fetch fill filter find finish flush force fork format generate get give guess
    handle help implement indicate initialize insert invoke issue iterate join kill list load lock log
    look lookup make map mark match measure merge mix modify move normalize notify obtain open pack parse
    perform play pop prepare pretty-print print process produce provide push put quote raise read receive
    record reduce refresh register release reload remove rename render replace report represent request
    reset resolve restore resume retrieve return reveal reverse rotate round run save scan schedule
    search seek select send serialize set show shuffle shut signal skip sort split start stop store
    strip submit subtract suspend take tell terminate test transfer transform translate truncate try
    unlink unpack unquote unregister unregister update use validate verify wait walk wrap write yield"""
VERBS = set(VERB_WORDS.split())
CLASSES = """str list dict set bytes int float tuple pathlib.Path datetime.datetime datetime.date
    collections.Counter collections.deque collections.OrderedDict threading.Thread threading.Event re.Pattern
    re.Match sqlite3.Connection sqlite3.Cursor logging.Logger argparse.ArgumentParser asyncio.Queue
    queue.Queue subprocess.Popen zipfile.ZipFile string.Template configparser.ConfigParser io.StringIO
    decimal.Decimal fractions.Fraction random.Random csv.DictWriter asyncio.Task"""


def third(verb: str) -> str:
    """'return' -> 'returns', 'match' -> 'matches', 'copy' -> 'copies'."""
    if re.search(r"(s|x|z|ch|sh|o)$", verb):
        return verb + "es"
    return verb[:-1] + "ies" if re.search(r"[^aeiou]y$", verb) else verb + "s"


THIRD = {third(v): v for v in VERBS} | {"is": "be"}


def sentences(doc: str, limit: int = 60) -> list[str]:
    """The sentences of the first paragraph of a docstring, without signatures and markup."""
    doc = inspect.cleandoc(doc)
    doc = re.sub(r"^[\w.]+\([^\n]*\)?( *-+> *[^\n]*)?\n\s*", "", doc)
    doc = re.sub(r"^[\w.]+\(.*?\) *(-+>|--|->|=>) *[\w ,\[\]]*?(\n|\. )\s*", "", doc)
    text = " ".join(re.split(r"\n\s*\n", doc.strip())[0].split())
    text = re.sub(r":\w+:`~?\.?([^`]*)`", r"\1", text).replace("``", "").replace("`", "")
    if ">>>" in text or not text.isascii():
        return []
    found: list[str] = []
    for part in re.split(r"(?<=[a-z0-9)'\"][.!?])\s+(?=[A-Z])", text):
        if len(" ".join([*found, part]).split()) > limit or part.endswith(":"):
            break
        found.append(part if part.endswith((".", "!", "?")) else part + ".")
    return found


def predicate(sentence: str, obj: object) -> str:
    """Turn the summary of a docstring into something that can follow the name."""
    first, _, rest = sentence.partition(" ")
    word = first.lower().rstrip(",:")
    if isinstance(obj, type) and issubclass(obj, BaseException):
        start = sentence[0].lower() if sentence[1:2].islower() else sentence[0]
        return f"is an exception: {start}{sentence[1:]}"
    if word in VERBS:
        return f"{third(word)} {rest}"
    if word in THIRD:
        return f"{word} {rest}"
    if word in ("a", "an", "the", "like"):
        return f"is {word} {rest}"
    return f"is described as follows: {sentence}"


@dataclass
class Entry:
    """One documented name."""

    name: str
    module: str
    does: str  # "returns the ...", one or more sentences
    signature: str = ""
    params: list[str] = field(default_factory=list)
    example: str = ""
    common: bool = False
    nicks: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)

    @property
    def brief(self) -> str:
        return re.split(r"(?<=[a-z0-9)'\"]\.)\s+(?=[A-Z])", self.does)[0]

    @property
    def shown_example(self) -> str:
        call, returns, value = self.example.partition(" returns ")
        return f"`{call}` returns `{value}`" if returns else f"`{self.example}`"


def table(name: str) -> Iterator[list[str]]:
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            yield [cell.strip() for cell in re.split(r" \|(?: |$)", line)]


def resolve(name: str) -> tuple[object, str]:
    """The object with this dotted name and the module in which it is found."""
    parts = name.split(".")
    for cut in range(len(parts), -1, -1):
        module = ".".join(parts[:cut]) or "builtins"
        try:
            obj: object = importlib.import_module(module)
            for part in parts[cut:]:
                obj = getattr(obj, part)
        except (ImportError, AttributeError):
            continue
        return obj, module
    raise LookupError(name)


def describe_signature(name: str, obj: object) -> tuple[str, list[str]]:
    """The signature as text, shortened if it is long, and the names of the parameters."""
    try:
        sig = inspect.signature(obj)  # type: ignore[arg-type]
        params = [p.replace(annotation=p.empty) for p in sig.parameters.values() if p.name not in ("self", "cls")]
        listed = [str(p) for p in params]
    except (TypeError, ValueError):
        found = re.match(rf"(?:\w+\.)?{name.rpartition('.')[2]}\(([\w, *=.]*)\)", getattr(obj, "__doc__", None) or "")
        if not found:
            return "", []
        listed = [p.strip() for p in found[1].split(",") if p.strip()]
    listed = [p for p in listed if " at 0x" not in p and "<" not in p]
    while len(", ".join(listed)) > 70:
        listed = [*listed[: -2 if listed[-1] == "..." else -1], "..."]
    return f"{name}({', '.join(listed)})", [p.partition("=")[0] for p in listed if p not in ("...", "*", "/")]


class Library:
    """The facts: entries, modules, prose, all taken from the running Python."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore")
        self.modules = {row[0]: row[1] for row in table("modules.txt")}
        self.concepts = [(words.split(" ; "), answer) for words, answer in table("concepts.txt")]
        self.entries: dict[str, Entry] = {}
        for name, does, *example in table("common.txt"):
            obj, module = resolve(name)
            signature, params = describe_signature(name, obj) if callable(obj) else ("", [])
            entry = Entry(name, module, does, signature, params, example[0] if example else "", common=True)
            self.entries[name] = entry
        last = [name.rpartition(".")[2] for name in self.entries]
        for entry in self.entries.values():
            nick = entry.name.rpartition(".")[2]
            if "." in entry.name and last.count(nick) == 1 and nick not in self.modules and len(nick) > 3:
                entry.nicks.append(nick)
        for tasks, name in table("tasks.txt"):
            self.entries[name].tasks += tasks.split(" ; ")
        for module in self.modules:
            mod = importlib.import_module(module)
            for attr in sorted(getattr(mod, "__all__", dir(mod))):
                self.add("" if module == "builtins" else module, attr, getattr(mod, attr, None), module)
        for name in CLASSES.split():
            cls, module = resolve(name)
            for attr in sorted(vars(cls)):
                self.add(name, attr, getattr(cls, attr, None), module)
        self.rare = [e for e in self.entries.values() if not e.common]
        self.common = [e for e in self.entries.values() if e.common]
        self.with_tasks = [e for e in self.common if e.tasks]
        self.of_module: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            if entry.name.rpartition(".")[0] in (entry.module, ""):
                self.of_module.setdefault(entry.module, []).append(entry)
        self.of_module = {name: sorted(es, key=lambda e: not e.common) for name, es in self.of_module.items()}
        self.popular = [name for name, es in self.of_module.items() if es[0].common]
        self.topics = {title: self.topic(key) for key, title in TOPICS.items() if len(self.topic(key)) > 100}
        self.prose = list(self.all_prose())

    def add(self, prefix: str, attr: str, obj: object, module: str) -> None:
        name = f"{prefix}.{attr}" if prefix else attr
        doc = getattr(obj, "__doc__", None)
        known = attr.startswith("_") or name in self.entries or isinstance(obj, types.ModuleType)
        if known or not callable(obj) or not isinstance(doc, str) or obj.__doc__ is type(obj).__doc__:
            return
        found = sentences(doc, 40)
        if not found or len(found[0]) < 12:
            return
        does = " ".join([predicate(found[0], obj), *found[1:2]])
        self.entries[name] = Entry(name, module, does, *describe_signature(name, obj))

    def all_prose(self) -> Iterator[str]:
        """Docstrings and topics as plain text."""
        for name in sorted(sys.stdlib_module_names - {"antigravity", "this", "idlelib", "test", "turtledemo"}):
            if name.startswith("_") or name == "lib2to3":
                continue
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            for attr in ["", *sorted(dir(module))]:
                obj = getattr(module, attr) if attr else module
                doc = getattr(obj, "__doc__", None)
                own = getattr(obj, "__module__", None) == name and callable(obj)
                if isinstance(doc, str) and len(doc) > 40 and not attr.startswith("_") and (own or not attr):
                    text = inspect.cleandoc(doc)[:1600]
                    yield f"{name}.{attr}\n\n{text}" if attr else f"The module {name}\n\n{text}"
        for topic in pydoc_data.topics.topics.values():
            paragraphs = re.split(r"\n\s*\n", topic.strip())
            for start in range(0, len(paragraphs), 5):
                yield "\n\n".join(re.sub(r"\n(?=\S)", " ", p) for p in paragraphs[start : start + 5])[:1600]

    def topic(self, key: str) -> str:
        """The first paragraphs of prose of a pydoc topic."""
        out: list[str] = []
        for paragraph in re.split(r"\n\s*\n", pydoc_data.topics.topics[key].strip()):
            text = " ".join(paragraph.split())
            bad = paragraph.startswith((" ", "*", "[", "|", "+", "-")) or "::=" in text or "***" in text
            if bad or len(text) < 60 or text.endswith(":") or not text.isascii():
                if out:
                    break
                continue
            out.append(text)
            if sum(map(len, out)) > 500:
                break
        return "\n\n".join(out)


TOPICS = {
    "for": "for statement", "while": "while statement", "if": "if statement", "with": "with statement",
    "try": "try statement", "import": "import statement", "function": "function definitions",
    "class": "class definitions", "lambda": "lambda expressions", "yield": "yield statement",
    "return": "return statement", "raise": "raise statement", "assert": "assert statement",
    "del": "del statement", "global": "global statement", "nonlocal": "nonlocal statement",
    "break": "break statement", "continue": "continue statement", "async": "async functions",
    "typesseq": "sequence types", "typesmapping": "mapping types", "formatstrings": "format strings",
    "numbers": "numeric literals", "strings": "string literals", "debugger": "the debugger",
    "exceptions": "exceptions", "naming": "naming and binding", "assignment": "assignment statements",
    "comparisons": "comparisons", "objects": "objects, values and types",
}  # fmt: skip

PHRASES = tomllib.loads((HERE / "phrases.toml").read_text(encoding="utf-8"))
ASK = {key: lines.strip().split("\n") for key, lines in PHRASES.items() if isinstance(lines, str)}
CHAT = [(chat["questions"].strip().split("\n"), chat["answers"]) for chat in PHRASES["chat"]]
SORRY = PHRASES["sorry"]


class Recipe:
    """An endless, reproducible stream of examples."""

    def __init__(self, seed: int, library: Library | None = None) -> None:
        self.lib = library or Library()
        self.rng = random.Random(seed)
        self.lists = list(self.lib.modules)
        values = Values(self.rng, [e.name for e in self.lib.common])
        self.tools = ToolRecipe(self.rng, values)
        self.json = JsonRecipe(self.rng, values, self.facts)
        self.weighted = [e for e in self.lib.common for _ in range(4 if "." not in e.name or e.tasks else 2)]

    # ---- questions ------------------------------------------------------------------------------------

    def style(self, text: str) -> str:
        """Vary case and punctuation the way people do."""
        rng = self.rng
        if rng.random() < 0.08 and text.endswith("?"):
            text = rng.choice(["Please: ", "Hi! ", "Hello, ", "Hey, ", "Quick question: ", "Question: ", "So, "]) + text
        roll = rng.random()
        if roll < 0.25:
            text = text[0].lower() + text[1:]
        elif roll < 0.29 and "`" not in text:
            text = text.lower()
        elif roll < 0.30:
            text = text.upper()
        if rng.random() < 0.25:
            text = text.rstrip("?.!")
        elif rng.random() < 0.04:
            text = text.rstrip("?.!") + rng.choice([" please", ", please.", "??", "!", " ?", "\n", " Thanks!"])
        return text or "?"

    def mention(self, entry: Entry) -> str:
        rng, name = self.rng, entry.name
        call = f"{name}()" if entry.signature else name
        forms = [name] * 8 + [call] * 2 + [f"`{name}`"] * 2
        if entry.signature and name.rpartition(".")[2].islower():
            forms += [f"the {name} function", f"the function {name}", f"Python's {name}"]
        if "." in name:
            head, _, tail = name.rpartition(".")
            forms += [f"{tail} from {head}", f"the {tail} function of {head}"] if entry.common else []
        forms += [rng.choice(entry.nicks)] * 4 if entry.nicks else []
        return rng.choice(forms)

    def ask(self, templates: list[str], **words: str) -> str:
        return self.style(self.rng.choice(templates).format(**words))

    # ---- answers --------------------------------------------------------------------------------------

    def describe(self, e: Entry) -> str:
        if not e.example:
            return f"`{e.name}` {e.does}"
        return f"`{e.name}` {e.does} For example: {e.shown_example}."

    def usage(self, e: Entry) -> str:
        text = f"Call it as `{e.signature}`. It {e.does}" if e.signature else f"`{e.name}` {e.does}"
        return f"{text} For example: {e.shown_example}." if e.example else text

    def arguments(self, e: Entry) -> str:
        if not e.signature:
            return f"I do not know the signature of `{e.name}`. Try `help({e.name})`."
        if not e.params:
            return f"`{e.name}` takes no arguments."
        names = [f"`{p}`" for p in e.params]
        word = "argument" if len(names) == 1 else "arguments"
        listed = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
        return f"The signature is `{e.signature}`. It takes the {word} {listed}."

    def where(self, e: Entry) -> str:
        if e.module == "builtins":
            return f"`{e.name}` is built in. You need no import."
        return f"`{e.name}` is in the module `{e.module}`. Write `import {e.module}` first."

    def which(self, e: Entry) -> str:
        return f"Use `{e.name}`. It {e.does}" + (f" For example: {e.shown_example}." if e.example else "")

    def module(self, name: str) -> str:
        entries = self.lib.of_module.get(name, [])[:4]
        text = f"The `{name}` module {self.lib.modules[name]}"
        if len(entries) > 2:
            names = [f"`{e.name}`" for e in entries]
            text += f" It contains {', '.join(names[:-1])} and {names[-1]}, among others."
        return text

    def listing(self, name: str) -> str:
        entries = self.lib.of_module.get(name, [])
        lines = [f"- `{e.name}` {e.brief}" for e in entries if len(e.brief) < 110][:10]
        return f"The `{name}` module {self.lib.modules[name]} Here is some of what it contains:\n\n" + "\n".join(lines)

    # ---- turns: lists of (question, answer) -------------------------------------------------------------

    def about(self, e: Entry) -> tuple[str, str]:
        rng, x = self.rng, self.mention(e)
        roll = rng.random()
        if roll < 0.60:
            return self.ask(ASK["describe"], x=x), self.describe(e)
        if roll < 0.70:
            return self.ask(ASK["usage"], x=x), self.usage(e)
        if roll < 0.78:
            return self.ask(ASK["args"], x=x), self.arguments(e)
        if roll < 0.84:
            return self.ask(ASK["where"], x=x), self.where(e)
        if roll < 0.90 and e.example:
            return self.ask(ASK["example"], x=x), f"Here is an example: {e.shown_example}."
        first, _, rest = e.brief.partition(" ")
        if first in THIRD and first != "is":
            return self.ask(ASK["which"], t=f"{THIRD[first]} {rest}".rstrip(".")), self.which(e)
        return self.ask(ASK["describe"], x=x), self.describe(e)

    def follow_up(self, e: Entry) -> tuple[str, str]:
        rng = self.rng
        options = [
            ("follow_arguments", self.arguments(e)),
            ("follow_where", self.where(e)),
            ("follow_usage", self.usage(e)),
        ]
        if e.example:
            options.append(("follow_example", f"Here is an example: {e.shown_example}."))
        kind, answer = rng.choice(options)
        return self.style(rng.choice(ASK[kind])), answer

    def also(self, e: Entry) -> tuple[str, str]:
        text = self.rng.choice(["And {x}?", "What about {x}?", "and {x}?", "And what does {x} do?", "Now explain {x}."])
        return text.format(x=self.mention(e)), self.describe(e)

    def small_talk(self) -> tuple[str, str]:
        questions, answers = self.rng.choice(CHAT[:3] * 4 + CHAT)
        return self.style(self.rng.choice(questions)), self.rng.choice(answers)

    def off_topic(self) -> tuple[str, str]:
        rng = self.rng
        words = {key: rng.choice(values.split()).replace("_", " ") for key, values in PHRASES["words"].items()}
        words["thing2"] = rng.choice(PHRASES["words"]["thing"].split()).replace("_", " ")
        n, k = str(rng.randrange(1, 1000)), str(rng.randrange(1, 100))
        if rng.random() < 0.06:
            task = rng.choice(["Summarize this text:", "Translate this:", "Correct this text:", "Classify this text:"])
            return f"{task} {rng.choice(self.lib.prose)[: rng.randrange(100, 1000)]}", SORRY
        return self.ask(ASK["off_topic"], n=n, k=k, **words), SORRY

    def unknown(self) -> tuple[str, str]:
        rng = self.rng
        made_up = "".join(rng.choices(PHRASES["syllables"].split(), k=rng.choice([2, 2, 3])))
        if rng.random() < 0.5:
            name = rng.choice(PHRASES["foreign"].split())
            full = (
                name
                if rng.random() < 0.4
                else f"{name}.{rng.choice([made_up, 'array', 'get', 'load', 'run', 'Model'])}"
            )
            answer = f"`{name}` is not part of Python's standard library, so I do not know it."
        else:
            head = rng.choice([*self.lists[:40], "str", "list", "dict"])
            full = made_up if rng.random() < 0.4 else f"{head}.{made_up}"
            answer = f"I do not know `{full}`. Is there such a name in Python's standard library?"
        return self.ask(ASK[rng.choice(["describe", "describe", "usage", "args"])], x=full), answer

    def turns(self) -> list[tuple[str, str]]:
        rng, lib = self.rng, self.lib
        kind = rng.choices(
            [
                "common",
                "task",
                "rare",
                "module",
                "listing",
                "topic",
                "concept",
                "chat",
                "off",
                "unknown",
                "multi",
            ],
            [28, 10, 20, 5, 3, 1.2, 5, 8, 6, 3, 10],
        )[0]
        if kind == "common":
            return [self.about(rng.choice(self.weighted))]
        if kind == "task":
            e = rng.choice(lib.with_tasks)
            return [(self.ask(ASK["which"], t=rng.choice(e.tasks)), self.which(e))]
        if kind == "rare":
            return [self.about(rng.choice(lib.rare))]
        if kind in ("module", "listing"):
            name = rng.choice(self.lists + lib.popular * 2)
            if kind == "module":
                return [(self.ask(ASK["module"], m=name), self.module(name))]
            if len(lib.of_module.get(name, [])) < 4:
                name = "os"
            return [(self.ask(ASK["listing"], m=name), self.listing(name))]
        if kind == "topic":
            title = rng.choice(list(lib.topics))
            return [(self.ask(ASK["topic"], x=title), lib.topics[title])]
        if kind == "concept":
            words, answer = rng.choice(lib.concepts)
            return [(self.ask(ASK["concept"], x=rng.choice(words)), answer)]
        if kind == "chat":
            return [self.small_talk()]
        if kind == "off":
            return [self.off_topic()]
        if kind == "unknown":
            return [self.unknown()]
        out = [self.small_talk()] if rng.random() < 0.25 else []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            e = rng.choice(self.weighted)
            out.append(self.about(e) if not out or rng.random() < 0.4 else self.also(e))
            if rng.random() < 0.7:
                out.append(self.follow_up(e))
        if rng.random() < 0.3:
            out.append(self.small_talk() if rng.random() < 0.6 else self.off_topic())
        return out

    # ---- tools and JSON ---------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What is known of a name, for an answer in JSON."""
        rng = self.rng
        e = rng.choice(self.weighted) if rng.random() < 0.8 else rng.choice(self.lib.rare)
        known: dict[str, Any] = {"name": e.name, "module": e.module, "summary": e.brief}
        if e.signature:
            known |= {"signature": e.signature, "arguments": e.params}
        return known | ({"example": e.example} if e.example else {})

    def system(self) -> str:
        rng = self.rng
        return rng.choice(ASK["system"]) if rng.random() < 0.8 else rng.choice(self.lib.prose)[:200]

    def tool_chat(self) -> list[Piece]:
        """Tools are offered, and called where a question needs them."""
        rng = self.rng
        offers = self.tools.offers()
        said = self.system() if rng.random() < 0.25 else ""
        pieces = [(f"<|im_start|>system\n{system_text(said, [tool for tool, _ in offers])}<|im_end|>\n", False)]

        def says(role: str, text: str) -> None:
            pieces.append((f"<|im_start|>{role}\n", False))
            pieces.append((f"{text}<|im_end|>", role == "assistant"))
            pieces.append(("\n", False))

        for _ in range(rng.choice([1, 1, 2])):
            roll = rng.random()
            if roll < 0.15:  # no tool is needed
                for question, answer in self.turns():
                    says("user", question)
                    says("assistant", answer)
                continue
            if roll < 0.20:  # none of these does it
                says("user", self.tools.made_up()[1]().question)
                says("assistant", SORRY)
                continue
            case = self.tools.case(offers)
            says("user", case.question.rstrip("?.") if rng.random() < 0.2 else case.question)
            says("assistant", "\n".join(call_text(*call) for call in case.calls))
            if rng.random() < 0.4:
                break
            for result in case.results:
                says("tool", result)
            says("assistant", case.answer)
        return pieces

    def without_tools(self) -> tuple[str, str]:
        """A question for tools, where there are none."""
        return self.tools.case(self.tools.offers()).question, SORRY

    def json_chat(self) -> list[Piece]:
        system, question, answer = self.json.turn()
        pieces = [(f"<|im_start|>system\n{system}<|im_end|>\n", False)] if system else []
        pieces.append((f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False))
        return [*pieces, (f"{answer}<|im_end|>", True), ("\n", False)]

    def chat(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self.rng.random() < 0.3:
            pieces.append((f"<|im_start|>system\n{self.system()}<|im_end|>\n", False))
        turns = self.turns() if self.rng.random() < 0.93 else [self.without_tools()]
        for question, answer in turns:
            pieces.append((f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False))
            pieces.append((f"{answer}<|im_end|>", True))
            pieces.append(("\n", False))
        return pieces

    def example(self) -> list[Piece]:
        """One document: a conversation, or (in 5 of 100 cases) plain text."""
        [kind] = self.rng.choices([self.chat, self.tool_chat, self.json_chat, None], [52, 30, 13, 5])
        if kind is None:
            return [(f"{self.rng.choice(self.lib.prose)}<|endoftext|>", True)]
        return [*kind(), ("<|endoftext|>", False)]


if __name__ == "__main__":
    recipe = Recipe(seed=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print(len(recipe.lib.common), "common,", len(recipe.lib.rare), "other,", len(recipe.lib.prose), "texts")
    for _ in range(40):
        print("".join(text for text, _ in recipe.example()), end="\n---\n")
