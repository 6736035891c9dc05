"""Requests of the routes for embeddings, scores and classes: OpenAI's, Jina's and Cohere's fields, and vLLM's.

What neither of them knows is ignored; options that this server does not offer are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

GivenInput = str | list[str | int | list[int]]
"""One text, the tokens of one, or a list of these, all of one kind."""


class PoolingRequest(msgspec.Struct, kw_only=True):
    """What all of them share."""

    model: str
    truncate_prompt_tokens: int | None = None
    user: str | None = None


class InputRequest(PoolingRequest, kw_only=True):
    input: GivenInput
    add_special_tokens: bool | None = None


class EmbeddingRequest(InputRequest, kw_only=True):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    """Vectors of length 1; default: as the model's files say."""
    prompt_name: str | None = None
    """One of the prompts in config_sentence_transformers.json, which goes before each text."""


class PoolingTaskRequest(EmbeddingRequest, kw_only=True):
    """Of /pooling."""

    task: Literal["embed", "token_embed", "classify"] | None = None
    use_activation: bool | None = None


class ClassifyRequest(InputRequest, kw_only=True):
    use_activation: bool | None = None
    """False: logits."""


class ScoreRequest(PoolingRequest, kw_only=True):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    use_activation: bool | None = None


class Document(msgspec.Struct):
    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    use_activation: bool | None = None


_NOTHING = ("null",)
_OFF = ("null", "false")
UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "chat_template": _NOTHING,
    "data_1": _NOTHING,
    "data_2": _NOTHING,
    "embed_dtype": ("null", '"float32"'),
    "embedding_types": ("null", '["float"]'),
    "endianness": ("null", '"native"', '"little"'),
    "input_type": _NOTHING,
    "instruction": _NOTHING,
    "late_chunking": _OFF,
    "messages": _NOTHING,
    "mm_processor_kwargs": ("null", "{}"),
    "output_dtype": ("null", '"float"'),
    "priority": ("null", "0"),
    "rank_fields": _NOTHING,
    "step_tag_id": _NOTHING,
    "truncation_side": ("null", '"right"'),
}
