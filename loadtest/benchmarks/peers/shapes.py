"""The models of the generation tables: real architectures with random weights."""

from __future__ import annotations

from typing import Any

import msgspec

VOCABULARY = 4096
"""Entries of the tokenizer. A model may have more."""
CONTEXT = 4096


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    model_type: str
    title: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    rope_theta: float
    spread: float
    """Standard deviation of the weights."""
    tied: bool
    """The output layer is the embedding."""
    biases: bool
    """Of queries, keys and values."""
    waves: int
    """Of requests, in a run: with one, all begin and end at about the same time."""
    least_requests: int
    """In a run: with fewer it would be over before it is known."""

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """config.json, as transformers writes it."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.spread,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


SHAPES = {
    "tiny": Shape(
        architecture="LlamaForCausalLM",
        model_type="llama",
        title="Llama, 4 layers of 256 (4.9 M parameters)",
        layers=4,
        hidden=256,
        intermediate=688,
        heads=8,
        kv_heads=2,
        vocabulary=VOCABULARY,
        rope_theta=10_000.0,
        spread=0.05,
        tied=False,
        biases=False,
        waves=4,
        least_requests=32,
    ),
    "qwen05b-shape": Shape(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        title="the shape of Qwen2.5-0.5B (494 M parameters)",
        layers=24,
        hidden=896,
        intermediate=4864,
        heads=14,
        kv_heads=2,
        vocabulary=151_936,
        rope_theta=1_000_000.0,
        spread=0.02,
        tied=True,
        biases=True,
        waves=1,
        least_requests=2,
    ),
}
