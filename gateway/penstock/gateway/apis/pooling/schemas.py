"""Requests of the routes for embeddings, scores and classes: fields of OpenAI, Jina, Cohere, TEI and vLLM.

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
    truncation_side: Literal["left", "right"] | None = None
    """Which end of what is too long is cut off; default: right."""
    user: str | None = None


class InputRequest(PoolingRequest, kw_only=True):
    input: GivenInput
    add_special_tokens: bool | None = None
    padding: bool | str | None = None
    """vLLM's and Hugging Face's: it changes no number."""


class EmbeddingRequest(InputRequest, kw_only=True):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    """Vectors of length 1; default: as the model's files say."""
    use_activation: bool | None = None
    """False is vLLM's word for `normalize` false; of a model with a head: logits."""
    prompt_name: str | None = None
    """One of the prompts in config_sentence_transformers.json, which goes before each text."""
    input_type: str | None = None
    """A hint that chooses the prompt where `prompt_name` does not: Cohere's, Voyage's and NVIDIA's words for it."""


class PoolingTaskRequest(EmbeddingRequest, kw_only=True):
    """Of /pooling."""

    task: Literal["embed", "token_embed", "classify"] | None = None


class ClassifyRequest(InputRequest, kw_only=True):
    use_activation: bool | None = None
    """False: logits."""


class ScoreRequest(PoolingRequest, kw_only=True):
    text_1: str | list[str] | None = None
    queries: str | list[str] | None = None
    data_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_2: str | list[str] | None = None
    use_activation: bool | None = None


class Document(msgspec.Struct):
    text: str


Direction = Literal["Left", "Right", "left", "right"]


class RerankRequest(PoolingRequest, kw_only=True):
    model: str = ""
    """"": the only model that ranks."""
    query: str
    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    """TEI's name of the documents: the answer has its form, too."""
    top_n: int | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    max_tokens_per_doc: int | None = None
    """0: no bound, as in vLLM."""
    use_activation: bool | None = None
    raw_scores: bool | None = None
    """True: logits, as `use_activation` false."""
    truncate: bool | None = None
    truncation_direction: Direction | None = None


class TeiEmbedRequest(PoolingRequest, kw_only=True):
    """Of /embed."""

    model: str = ""
    """"": the only model that gives embeddings."""
    inputs: GivenInput
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class CohereContent(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class CohereInput(msgspec.Struct, kw_only=True):
    content: list[CohereContent]


EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereEmbedRequest(PoolingRequest, kw_only=True):
    """Of /v1/embed and /v2/embed: https://docs.cohere.com/reference/embed."""

    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    input_type: str | None = None
    """A hint: which of the model's prompts goes before the texts."""
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    priority: int | None = None


_NOTHING = ("null",)
_OFF = ("null", "false")
UNSUPPORTED: Mapping[str, tuple[str, ...]] = {
    "chat_template": _NOTHING,
    "embed_dtype": ("null", '"float32"'),
    "embedding_types": ("null", '["float"]'),
    "endianness": ("null", '"native"', '"little"'),
    "instruction": _NOTHING,
    "late_chunking": _OFF,
    "messages": _NOTHING,
    "mm_processor_kwargs": ("null", "{}"),
    "output_dtype": ("null", '"float"'),
    "priority": ("null", "0"),
    "rank_fields": _NOTHING,
    "step_tag_id": _NOTHING,
}
