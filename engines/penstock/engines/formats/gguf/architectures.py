"""How llama.cpp's architectures correspond to Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_ATTENTION_AND_MLP = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_GEMMA3_27B_LAYERS = 62
"""The one size of Gemma 3 that scales its queries by another number than head_dim."""


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture."""

    hugging_face: str
    """What config.json calls it."""
    block_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_ATTENTION_AND_MLP | _TWO_NORMS))
    """Of a layer, what its parts are called in a checkpoint of Hugging Face."""
    pairs_interleaved: bool = False
    """The rows of queries and keys are in llama.cpp's order for rotary embedding."""
    norms_plus_one: bool = False
    """The 1 that Gemma adds to a norm's weights is in the file already."""
    settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    """What llama.cpp knows by the architecture, of config.json as far as the file tells it."""


def _gemma3(config: Mapping[str, Any]) -> Mapping[str, Any]:
    is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scale = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": scale}


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", pairs_interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        block_parts=MappingProxyType(_ATTENTION_AND_MLP | _FOUR_NORMS),
        norms_plus_one=True,
        settings=_gemma3,
    ),
}
