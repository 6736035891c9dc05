"""The form of errors for each path, and whether a request may be repeated: for proxies, which know nothing else of a
request."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.gateway.apis.anthropic.errors import ANTHROPIC_ERRORS
from penstock.gateway.apis.kserve.errors import KSERVE_ERRORS
from penstock.gateway.apis.ollama.errors import OLLAMA_ERRORS
from penstock.gateway.apis.pooling.cohere import COHERE_ERRORS
from penstock.gateway.transports.http.error_form import OPENAI_ERRORS, ErrorForm


@dataclass(frozen=True, slots=True)
class AnswerForm:
    errors: ErrorForm
    repeatable: bool
    """A request of which nothing has been answered may be sent to another replica: it changes nothing but caches. A
    classic model may do whatever it likes."""


_TEXT = AnswerForm(OPENAI_ERRORS, repeatable=True)
_ROUTES = (
    (r"/v1/(chat/completions|completions|responses|embeddings|rerank|score|classify)", _TEXT),
    (r"/v2/rerank|/rerank|/score|/classify|/pooling|/embed|/tokenize|/detokenize", _TEXT),
    (r"/v[12]/embed", AnswerForm(COHERE_ERRORS, repeatable=True)),
    (r"/v1/messages(/count_tokens)?", AnswerForm(ANTHROPIC_ERRORS, repeatable=True)),
    (r"/api/(chat|generate|embed|embeddings)", AnswerForm(OLLAMA_ERRORS, repeatable=True)),
    (r"/v2/models/.+/(infer|generate|generate_stream)", AnswerForm(KSERVE_ERRORS, repeatable=False)),
)
_PATHS = [(re.compile(rf"(?:.*)(?:{pattern})/?"), form) for pattern, form in _ROUTES]


def error_form(path: str) -> ErrorForm:
    """Of any path of ours."""
    if path.startswith("/v2/"):
        return KSERVE_ERRORS
    return next((form.errors for pattern, form in _PATHS if pattern.fullmatch(path)), OPENAI_ERRORS)


def answer_form(method: str, path: str) -> AnswerForm | None:
    """None for what is not inference. Any prefix may stand before the path."""
    if method != "POST":
        return None
    return next((form for pattern, form in _PATHS if pattern.fullmatch(path)), None)
