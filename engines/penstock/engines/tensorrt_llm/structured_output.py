"""Grammars in the words of TensorRT-LLM, which compiles and follows them itself."""

from __future__ import annotations

import json
from typing import Any

from penstock.engines.contract.messages import Grammar
from penstock.engines.errors import UnsupportedError
from penstock.tokenizers import lark
from penstock.tokenizers.grammars.schemas import with_exact_numbers
from penstock.tokenizers.schema_bounds import check_schema_bounds

BACKEND = "guided_decoding_backend"
"""The argument of the LLM that names what compiles grammars: "llguidance" or "xgrammar"."""


def guide(grammar: Grammar, backend: str) -> dict[str, Any]:
    """Arguments of GuidedDecodingParams. A grammar of the caller's goes on as it is: Lark for llguidance, EBNF for
    xgrammar. Raises UnsupportedError for an answer behind a thought, which TensorRT-LLM cannot tell from it, ValueError
    for a schema that would take too much (`check_schema_bounds`), or has numbers that cannot be kept."""
    if grammar.thought is not None or grammar.preface or grammar.budget is not None:
        message = "Structured output behind a thought, and bounds of thoughts, are not supported with TensorRT-LLM."
        raise UnsupportedError(message)
    check_schema_bounds(grammar.kind, grammar.text)
    is_lark = backend == "llguidance"
    kind, text = with_exact_numbers(grammar.kind, grammar.text) if is_lark else (grammar.kind, grammar.text)
    if kind == "json_schema":
        schema = json.loads(text)
        return {"json": json.dumps(lark.guided_schema(schema) if is_lark else schema)}
    if kind == "choice":
        start = "start:" if is_lark else "root ::="
        return {"grammar": f"{start} {' | '.join(json.dumps(choice) for choice in json.loads(text))}"}
    return {kind: text}
