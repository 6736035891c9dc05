"""From a JSON schema, a regular expression, a list of choices or a grammar to a matcher of tokens, by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llguidance

from ..hf import load_backend
from .matcher import TokenMatcher

_WHITE_SPACE = r"( |\n[ \t]{0,20})"
"""Between the tokens of JSON. Without a bound, a model that is at a loss writes spaces until its tokens are used up."""
_GAP = r"/[ \t\n\r]{0,4}/"
"""Between the end of a thought and the answer."""
_LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "verbose_errors": False,
}
_MAX_PROBLEM_CHARS = 300

_SOURCES: dict[str, Callable[[str], str]] = {
    "json_schema": lambda text: llguidance.LLMatcher.grammar_from_json_schema(
        text, overrides={"whitespace_pattern": _WHITE_SPACE, "lenient": False}
    ),
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "choice": lambda text: llguidance.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(choice) for choice in json.loads(text))
    ),
    "grammar": lambda text: llguidance.grammar_from("grammar", text),
}


class GrammarError(ValueError):
    """A grammar that cannot be compiled. The message names what is wrong with it, and is safe to show to its author."""


class CompiledGrammar:
    """Valid for one vocabulary. Copies of a matcher share what they have learned of the grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def start(self, output: Sequence[int] = ()) -> TokenMatcher:
        """A matcher for one output, of which these tokens are there already."""
        matcher = TokenMatcher(self._matcher.deep_copy())
        matcher.consume(output)
        return matcher


class GrammarCompiler:
    """Compiles grammars for a model's vocabulary. Safe to use from several threads."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`folder` has tokenizer.json; `vocab_size` is the number of logits. Nothing is read before the first grammar:
        a large vocabulary takes seconds and 100 MB."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None

    def compile(self, kind: str, text: str, thought_end: str = "") -> CompiledGrammar:
        """`kind` says what `text` is: "json_schema"; "regex", which the whole output must match; "choice", a JSON list
        of texts; "grammar", in llguidance's Lark dialect or in GBNF.

        With `thought_end`, the grammar holds behind the first occurrence of this text, and anything is allowed before.
        Raises GrammarError, TokenizerError.
        """
        tokenizer = self._loaded_tokenizer()
        try:
            grammar = _SOURCES[kind](text)
            if thought_end:
                grammar = _behind_thought(grammar, thought_end, _special_token(tokenizer, thought_end))
        except (ValueError, RecursionError) as error:
            raise GrammarError(_told(str(error))) from None
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise GrammarError(_told(matcher.get_error()))
        return CompiledGrammar(matcher)

    def _loaded_tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                if not self._eos_token_ids:
                    raise GrammarError("the model has no end-of-sequence token, so its output could not end")
                self._tokenizer = llguidance.LLTokenizer(
                    load_backend(self._folder)[0].to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
            return self._tokenizer


def _behind_thought(grammar: str, thought_end: str, token_id: int | None) -> str:
    """`token_id`: of `thought_end`, if that is a special token, which no text matches."""
    # llguidance has Lark as it is, and all else as JSON.
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    if token_id is None:
        end = re.escape(thought_end).replace("/", r"\/")
        thought = f"start: thought {_GAP} @answer\nthought[lazy]: /(.|\\n)*{end}/"
    else:
        thought = f"start: THOUGHT <[{token_id}]> {_GAP} @answer\nTHOUGHT: /(.|\\n)*/"
    return json.dumps({"grammars": [{"lark_grammar": thought}, answer | {"name": "answer"}]})


def _special_token(tokenizer: llguidance.LLTokenizer, text: str) -> int | None:
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    return tokens[0] if len(tokens) == 1 and tokenizer.is_special_token(tokens[0]) else None


def _told(problem: str) -> str:
    """One line without the compiler's own drawings of where it was."""
    line = " ".join(problem.split())
    return line if len(line) <= _MAX_PROBLEM_CHARS else line[:_MAX_PROBLEM_CHARS] + " ..."
