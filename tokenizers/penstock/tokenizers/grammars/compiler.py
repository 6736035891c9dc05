"""From a JSON schema, a regular expression, a list of choices or a grammar to a matcher of tokens, by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from .. import lark
from ..hf import Tokenizer, load_backend
from ..reasoning import ThoughtTags
from ..schema_bounds import check_schema_bounds
from .matcher import TokenMatcher
from .schemas import Effort, rewritten, with_exact_numbers
from .thought_budget import BudgetedMatcher, ThoughtBudgetGrammar, ThoughtWatch

_BYTES = 1 << 29
"""Of address space: only what is used of it takes memory. llguidance compiles what a rule or a schema refers to inside
of what refers to it, and has no bound on that. A character of a grammar takes less than 1 kB of stack."""

_T = TypeVar("_T")
_starting = threading.Lock()


def on_deep_stack(work: Callable[[], _T]) -> _T:
    """What `work` gives, or raises, in a thread of its own. A stack that overflows ends the whole process."""
    with _starting:  # the size holds for all threads that start from now on
        usual = threading.stack_size(_BYTES)
        try:
            executor = ThreadPoolExecutor(1, "deep-stack")
            result = executor.submit(work)
        finally:
            threading.stack_size(usual)
    with executor:
        return result.result()


_LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "verbose_errors": False,
}
_LEXER_FUEL = 250_000
_LEXER_FUEL_OF_PATTERNS = 60_000
"""Optional parts in a row, as in `a?a?a?`, take memory by the square of their number: 250 MB for as many as this
allows, and tens of gigabytes for as many as llguidance does by itself. Lists of constants need more fuel and little
memory."""
_MAX_PROBLEM_CHARS = 300
_MAX_CHARS = 1 << 19
"""What callers write has half as many at most; the schemas of a call's tools together may have more."""
_MAX_GBNF = 1 << 25
"""Rules times characters: the translation to Lark may look at all rules once for each rule."""

_IS_LARK = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")

_CODE = re.compile(r"\\(?:x|u00|U000000|x\{|u\{)([0-7][0-9a-fA-F])\}?")
_MARKUP = re.compile(r"""\?:|[\\\[\](){}"\s]""")

_SOURCES: dict[str, Callable[[str], str]] = {
    "json_schema": lambda text: llguidance.LLMatcher.grammar_from_json_schema(
        text, defaults={"whitespace_pattern": lark.JSON_SPACE}, overrides={"lenient": False}
    ),
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "choice": lambda text: llguidance.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(choice) for choice in json.loads(text))
    ),
    "grammar": lambda text: llguidance.LLMatcher.grammar_from_lark(_as_lark(text)),
}


class GrammarError(ValueError):
    """A grammar that cannot be compiled. The message names what is wrong with it, and is safe to show to its author."""


class CompiledGrammar:
    """Valid for one vocabulary. Copies of a matcher share what they have learned of the grammar."""

    def __init__(self, matcher: llguidance.LLMatcher | None, budget: ThoughtBudgetGrammar | None = None) -> None:
        self._matcher = matcher
        self._budget = budget
        self.is_worn_out = False
        """It has learned as much as it may, and follows no further output: compile it again."""

    def start(self, output: Sequence[int] = ()) -> TokenMatcher:
        """A matcher for one output, of which these tokens are there already."""
        own = None if self._matcher is None else self._matcher.deep_copy()
        if self._budget is None:
            matcher = TokenMatcher(own, self._wear_out)
        else:
            matcher = BudgetedMatcher(ThoughtWatch(self._budget), own, self._wear_out)
        matcher.consume(output)
        return matcher

    def _wear_out(self) -> None:
        self.is_worn_out = True


class _Vocabulary(NamedTuple):
    tokenizer: llguidance.LLTokenizer
    special_ids: dict[str, int]
    """By their text. llguidance takes all added tokens as special, also those that are not marked so, such as Qwen's
    <tool_call>: text never matches them."""


class GrammarCompiler:
    """Compiles grammars for a model's vocabulary. Safe to use from several threads."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`folder` has tokenizer.json; `vocab_size` is the number of logits. Nothing is read before the first grammar:
        a large vocabulary takes seconds and 100 MB."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._tokenizer: Tokenizer | None = None

    def compile(
        self,
        kind: str,
        text: str,
        thought: tuple[str, str] | None = None,
        preface: str = "",
        budget: tuple[ThoughtTags, int] | None = None,
    ) -> CompiledGrammar:
        """`kind` says what `text` is: "json_schema"; "regex", which the whole output must match; "choice", a JSON list
        of texts; "grammar", in llguidance's Lark dialect or in GBNF; "text", which is any text.

        The grammar holds behind a thought, given as the texts that begin and end it, and behind `preface`. A thought
        with a beginning may be left out; without one, the output begins inside of it. `budget`: the tags of thoughts,
        and how many tokens these may have together. Raises GrammarError, TokenizerError.
        """
        if len(text) > _MAX_CHARS:
            raise GrammarError(f"it has more than {_MAX_CHARS} characters")
        matcher = None if kind == "text" else self._matcher(kind, text, thought, preface)
        return CompiledGrammar(
            matcher, None if budget is None else ThoughtBudgetGrammar(self._loaded_tokenizer(), *budget)
        )

    def _matcher(self, kind: str, text: str, thought: tuple[str, str] | None, preface: str) -> llguidance.LLMatcher:
        try:
            return self._compiled(kind, text, thought, preface)
        except GrammarError as refused:
            other = _in_other_words(kind, text)
            if other is None:
                raise
            try:
                return self._compiled(kind, other, thought, preface)
            except GrammarError:
                raise refused from None  # it speaks of the author's own keywords

    def _compiled(self, kind: str, text: str, thought: tuple[str, str] | None, preface: str) -> llguidance.LLMatcher:
        vocabulary = self._loaded_vocabulary()
        try:
            check_schema_bounds(kind, text)
            kind, text = with_exact_numbers(kind, text)
            grammar = _SOURCES[kind](text)
            spells_tags = _may_spell(text, vocabulary.special_ids)
            if thought or preface or spells_tags:
                grammar = _framed(grammar, thought, preface, vocabulary.special_ids)
            if spells_tags:
                grammar = _unforced(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_one_line(str(error))) from None
        fuel = _LEXER_FUEL_OF_PATTERNS if kind == "regex" or '"pattern"' in text else _LEXER_FUEL
        limits = llguidance.LLParserLimits(initial_lexer_fuel=fuel, **_LIMITS)
        make = partial(llguidance.LLMatcher, vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        matcher: llguidance.LLMatcher = on_deep_stack(make)
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        return matcher

    def _loaded_tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer(self._folder)
            return self._tokenizer

    def _loaded_vocabulary(self) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                if not self._eos_token_ids:
                    raise GrammarError("the model has no end-of-sequence token, so its output could not end")
                backend, _ = load_backend(self._folder)
                added = backend.get_added_tokens_decoder()
                self._vocabulary = _Vocabulary(
                    llguidance.LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids),
                    {token.content: token_id for token_id, token in added.items()},
                )
            return self._vocabulary


def _as_lark(text: str) -> str:
    """Lark as it is, and GBNF in Lark. Raises ValueError."""
    if _IS_LARK.search(text):
        return text
    if text.count("::=") * len(text) > _MAX_GBNF:
        raise ValueError("a grammar in GBNF must not have so many rules")
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # of many kinds, Exception itself is one
        raise ValueError(f"it is neither Lark with a rule `start` nor GBNF: {error}") from None


def _in_other_words(kind: str, text: str) -> str | None:
    """With schemas that say the same in keywords that llguidance knows. None: there are none, or it takes too long to
    say."""
    effort = Effort()
    try:
        if kind == "json_schema":
            return rewritten(text, effort)
        return lark.with_schemas(text, partial(rewritten, effort=effort)) if kind == "grammar" else None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):  # one is no schema, for example
        return None


def _framed(grammar: str, thought: tuple[str, str] | None, preface: str, special_ids: Mapping[str, int]) -> str:
    # llguidance has Lark as it is, and all else as JSON.
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    space = lark.regex(lark.SPACE) if thought or preface else ""
    frame = f"{lark.literal(preface, special_ids)} {space} @answer"
    if thought is None:
        rules = f"start: {frame}"
    else:
        begin, end = thought
        terminals = [f"thought[lazy]: {lark.regex(lark.up_to(end))}"]
        inside = "thought"
        first, *rest = lark.split(end, special_ids)
        if first in special_ids:  # spelled, it ends the thought as well, as the parsers see it
            inside = f"(THOUGHT {lark.literal(end, special_ids)} | thought)"
            terminals.append(r"THOUGHT: /(.|\n)*/")
        elif rest:
            inside = f"thought {lark.literal(''.join(rest), special_ids)}"
            terminals = [f"thought[lazy]: {lark.regex(lark.up_to(first))}"]
        optional = f"({lark.literal(begin, special_ids)} {inside})?" if begin else inside
        rules = "\n".join((f"start: {optional} {frame}", *terminals))
    return json.dumps({"grammars": [{"lark_grammar": rules}, answer | {"name": "answer"}]})


def _may_spell(text: str, special_ids: Mapping[str, int]) -> bool:
    """Whether the grammar may have one of these in a text that it demands, escaped or in pieces perhaps."""
    bare = _bare(text)
    return any(tag in text or (_bare(tag) or tag) in bare for tag in special_ids)


def _bare(text: str) -> str:
    """Without what regular expressions, JSON and Lark put around and between letters."""
    return _MARKUP.sub("", _CODE.sub(lambda match: chr(int(match[1], 16)), text))


def _unforced(framed: str) -> str:
    """Where only one text can follow, llguidance forces its tokens, as the model's tokenizer splits it. A special
    token's text that is meant as text would become that token, which the grammar does not allow."""
    first, *rest = json.loads(framed)["grammars"]
    rules = '%llguidance {"no_forcing": true}\n' + first["lark_grammar"]
    return json.dumps({"grammars": [first | {"lark_grammar": rules}, *rest]})


def _one_line(problem: str) -> str:
    """One line without the compiler's own drawings of where it was."""
    line = " ".join(problem.split())
    return line if len(line) <= _MAX_PROBLEM_CHARS else line[:_MAX_PROBLEM_CHARS] + " ..."
