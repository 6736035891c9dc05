"""How llama.cpp's architectures correspond to Hugging Face's.

Names of tensors are those of gguf-py's tensor_mapping.py; what a file does not say and llama.cpp knows is in its
src/models, and how its converter orders rows in its conversion/.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from penstock.engines.formats.gguf import architecture_settings as settings_of
from penstock.engines.formats.gguf.settings import FileSettings

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FOUR_NORMS = {**_NORMS_BEHIND, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"{part}_shexp": name.replace("mlp.", "mlp.shared_expert.") for part, name in _MLP.items()},
}
_DENSE = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
"""Of BLOOM, Falcon and, with another name of the attention, GPT-NeoX."""


@dataclass(frozen=True)
class Architecture:
    """One value of general.architecture. Names are those of a checkpoint of Hugging Face."""

    hugging_face: str
    """What config.json calls it."""
    block_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_ATTENTION | _MLP | _TWO_NORMS))
    """Of a layer's parts."""
    expert_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of the matrices that have all experts of a layer, with {} for an expert's number."""
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    other_parts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of the rest of the model."""
    eps_key: str = "rms_norm_eps"
    """Of config.json."""
    pairs_interleaved: bool = False
    """The rows of queries and keys are in llama.cpp's order for rotary embedding."""
    by_key_head: bool = False
    """Hugging Face has for each head of keys its queries, its key and its value, where the file has all queries
    first, then all keys, then all values."""
    norms_plus_one: bool = False
    """The 1 that Gemma adds to a norm's weights is in the file already."""
    settings: Callable[[FileSettings, Mapping[str, Any]], Mapping[str, Any]] = lambda settings, config: {}
    """What the family has beyond the common settings, or in their place; gets config.json with those."""

    @property
    def eps(self) -> str:
        """Of the metadata."""
        return f"attention.layer_norm_{'rms_' if self.eps_key == 'rms_norm_eps' else ''}epsilon"


def _named(*parts: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({key: name for each in parts for key, name in each.items()})


def _of_experts(names: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({f"{part}_exps": name for part, name in names.items()})


_EXPERTS = _of_experts({part: name.replace("mlp.", "mlp.experts.{}.") for part, name in _MLP.items()})
_ROUTED = _named(_ATTENTION, _TWO_NORMS, _SHARED_EXPERT, {"ffn_gate_inp": "mlp.gate"})
_LLAMA = Architecture("LlamaForCausalLM", pairs_interleaved=True)
_FALCON = Architecture(
    "FalconForCausalLM",
    _named(_DENSE, {"attn_norm": "input_layernorm"}),
    layers="transformer.h",
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
    eps_key="layer_norm_epsilon",
    by_key_head=True,
    settings=settings_of.falcon,
)

ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _named(_ATTENTION, _MLP, _FOUR_NORMS),
        norms_plus_one=True,
        settings=settings_of.gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        _named(_ATTENTION, _MLP, _FOUR_NORMS),
        norms_plus_one=True,
        settings=settings_of.gemma3,
    ),
    "granite": replace(_LLAMA, hugging_face="GraniteForCausalLM", settings=settings_of.granite),
    "smollm3": replace(_LLAMA, hugging_face="SmolLM3ForCausalLM", settings=settings_of.smollm3),
    "olmo2": Architecture("Olmo2ForCausalLM", _named(_ATTENTION, _MLP, _NORMS_BEHIND), settings=settings_of.olmo2),
    "exaone": Architecture("LlamaForCausalLM"),
    "exaone4": Architecture(
        "Exaone4ForCausalLM", _named(_ATTENTION, _MLP, _NORMS_BEHIND), settings=settings_of.exaone4
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _named(_ATTENTION, _MLP, _TWO_NORMS, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    ),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _ROUTED, _EXPERTS, settings=settings_of.qwen2moe),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _ROUTED, _EXPERTS, settings=settings_of.qwen3moe),
    "olmoe": Architecture("OlmoeForCausalLM", _ROUTED, _EXPERTS, settings=settings_of.olmoe),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _named(
            _ATTENTION,
            {
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            },
        ),
        _EXPERTS,
        settings=settings_of.gpt_oss,
    ),
    "stablelm": Architecture("StableLmForCausalLM", eps_key="layer_norm_eps", settings=settings_of.stablelm),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        _named(_ATTENTION, _TWO_NORMS, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
        eps_key="norm_epsilon",
        settings=settings_of.starcoder2,
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        _named(_ATTENTION, _TWO_NORMS, {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
        norm="model.final_layernorm",
        eps_key="layer_norm_eps",
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        MappingProxyType(
            {
                "attn_norm": "ln_1",
                "attn_qkv": "attn.c_attn",
                "attn_output": "attn.c_proj",
                "ffn_norm": "ln_2",
                "ffn_up": "mlp.c_fc",
                "ffn_down": "mlp.c_proj",
            }
        ),
        layers="transformer.h",
        embedding="transformer.wte",
        norm="transformer.ln_f",
        other_parts=MappingProxyType({"position_embd": "transformer.wpe"}),
        eps_key="layer_norm_epsilon",
        settings=settings_of.gpt2,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        _named({part: name.replace("self_attention", "attention") for part, name in _DENSE.items()}, _TWO_NORMS),
        layers="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        eps_key="layer_norm_eps",
        by_key_head=True,
        settings=settings_of.gptneox,
    ),
    "falcon": _FALCON,
    "bloom": replace(
        _FALCON,
        hugging_face="BloomForCausalLM",
        block_parts=_named(_DENSE, _TWO_NORMS),
        other_parts=MappingProxyType({"token_embd_norm": "transformer.word_embeddings_layernorm"}),
        settings=settings_of.bloom,
    ),
}

_VARIANTS = {
    "llama": (
        "blk.0.ffn_gate_inp.weight",
        replace(
            _LLAMA,
            hugging_face="MixtralForCausalLM",
            block_parts=_named(_ATTENTION, _TWO_NORMS, {"ffn_gate_inp": "block_sparse_moe.gate"}),
            expert_parts=_of_experts(
                {
                    part: f"block_sparse_moe.experts.{{}}.{name}"
                    for part, name in zip(_MLP, ("w1", "w3", "w2"), strict=True)
                }
            ),
            settings=settings_of.mixtral,
        ),
    ),
    "falcon": (
        "blk.0.attn_norm_2.weight",
        replace(_FALCON, block_parts=_named(_DENSE, {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})),
    ),
}
"""Architectures that have one name with another, by a tensor of theirs alone."""


def find_architecture(name: object, tensors: Container[str]) -> Architecture | None:
    """By general.architecture and the names of the file's tensors."""
    tensor, variant = _VARIANTS.get(str(name), ("", None))
    return variant if tensor in tensors else ARCHITECTURES.get(str(name))
