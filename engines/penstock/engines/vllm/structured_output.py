"""Grammars in the words of vLLM, whose own scheduler compiles and follows them."""

from __future__ import annotations

import json
from typing import Any

from vllm.sampling_params import StructuredOutputsParams

from penstock.engines.contract.messages import Grammar
from penstock.engines.errors import UnsupportedError
from penstock.tokenizers import lark
from penstock.tokenizers.grammars.schemas import with_exact_numbers
from penstock.tokenizers.schema_bounds import check_schema_bounds

CONFIG = {"backend": "guidance"}
"""`structured_outputs_config`. It refuses schemas that it cannot keep; vLLM's default takes some of them anyway."""


def to_structured_outputs(grammar: Grammar, backend: str) -> StructuredOutputsParams:
    """`backend`: that of `structured_outputs_config`. Raises UnsupportedError where there are thoughts: vLLM would need
    a parser of its own for them. Raises ValueError for a schema that would take too much (`check_schema_bounds`), or
    has numbers that cannot be kept."""
    if grammar.thought is not None or grammar.preface or grammar.budget is not None:
        message = "Structured output behind a thought, and bounds of thoughts, need Penstock's scheduler."
        raise UnsupportedError(message)
    check_schema_bounds(grammar.kind, grammar.text)
    if backend == CONFIG["backend"]:
        return StructuredOutputsParams(**_one_of(*with_exact_numbers(grammar.kind, grammar.text)))
    return StructuredOutputsParams(**_one_of(grammar.kind, grammar.text))


def _one_of(kind: str, text: str) -> dict[str, Any]:
    if kind == "json_schema":
        return {"json": json.dumps(lark.guided_schema(json.loads(text)))}
    if kind == "choice":
        return {"choice": json.loads(text)}
    return {kind: text}
