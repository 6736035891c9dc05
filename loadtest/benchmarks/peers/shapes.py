"""The models of the generation tables: real architectures with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

VOCABULARY = 4096
"""Entries of the tokenizer. A model may have more."""
_PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TILES = ("<image>", "<fake_token_around_image>", "<global-img>", *_PLACES)
PATCHES = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
"""Tokens that models which read images have beside the tokenizer's, the image's first: of SmolVLM and of Qwen2.5-VL."""
CONTEXT = 4096
_LONG = 32_768
"""The same for models that are measured with long prompts."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Of LFM2's mixtures."""

    number: int
    chosen: int
    """Of them, for each token."""
    size: int
    dense: int
    """Layers in front that have none."""


class DeltaNet(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of Qwen3.5's recurrent layers."""

    heads: int
    head: int
    kernel: int

    @property
    def size(self) -> int:
        """Of the queries, the keys or the values of a token."""
        return self.heads * self.head


class Vision(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder of images: SmolVLM's, for tiles."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    side: int
    """Of a tile, in pixels."""
    patch: int
    joined: int
    """Patches that become one token are the square of it."""
    longest_edge: int
    """An image is enlarged to it, and cut into tiles."""

    has_genai: ClassVar[bool] = False
    """OpenVINO GenAI has a pipeline for it."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return TILES


class QwenVision(Vision, frozen=True, kw_only=True):
    """Qwen2.5-VL's, for pictures of any size: in most layers a patch attends to those of its window."""

    side: int = 0
    longest_edge: int = 0
    window: int
    """Its side, in pixels."""
    attends: tuple[int, ...]
    """Layers without windows."""
    has_genai = True

    @property
    def tokens(self) -> tuple[str, ...]:
        return PATCHES


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
    biases: bool = False
    """Of queries, keys and values."""
    head_dim: int = 0
    """0: the hidden size, divided among the heads."""
    context: int = CONTEXT
    attends: tuple[int, ...] | None = None
    """Layers with attention; the others are recurrent. None: all."""
    delta: DeltaNet | None = None
    experts: Experts | None = None
    vision: Vision | None = None
    waves: int
    """Of requests, in a run: with one, all begin and end at about the same time."""
    least_requests: int
    """In a run: with fewer it would be over before it is known."""

    @property
    def head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    def has_attention(self, layer: int) -> bool:
        return self.attends is None or layer in self.attends

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense

    def layer_types(self, recurrent: str) -> list[str]:
        """As hybrids name them."""
        return ["full_attention" if self.has_attention(layer) else recurrent for layer in range(self.layers)]

    def config(self) -> dict[str, Any]:
        """config.json, as transformers writes it."""
        config = {
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
            "max_position_embeddings": self.context,
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
        config |= _FAMILY_CONFIG.get(self.model_type, _nothing)(self)
        if self.vision is None:
            return config
        return (_qwen_seeing if isinstance(self.vision, QwenVision) else _seeing)(config, self.vision)


def _nothing(shape: Shape) -> dict[str, Any]:
    return {}


def _seeing(text: dict[str, Any], vision: Vision) -> dict[str, Any]:
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "text_config": text,
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": vision.hidden,
            "intermediate_size": vision.intermediate,
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.heads,
            "image_size": vision.side,
            "patch_size": vision.patch,
        },
        "image_token_id": VOCABULARY,
        "scale_factor": vision.joined,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "torch_dtype": "bfloat16",
    }


def _qwen_seeing(text: dict[str, Any], vision: Vision) -> dict[str, Any]:
    """Text settings stand beside the encoder's, as in the files that Qwen published."""
    assert isinstance(vision, QwenVision)
    half = text["head_dim"] // 2
    tokens = {name: VOCABULARY + at for at, name in enumerate(("image", "vision_start", "vision_end", "video"))}
    return (
        text
        | {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "rope_scaling": {"type": "mrope", "mrope_section": [half // 4, half * 3 // 8, half * 3 // 8]},
            "vision_config": {
                "model_type": "qwen2_5_vl",
                "depth": vision.layers,
                "hidden_size": vision.hidden,
                "hidden_act": "silu",
                "intermediate_size": vision.intermediate,
                "num_heads": vision.heads,
                "in_chans": 3,
                "out_hidden_size": text["hidden_size"],
                "patch_size": vision.patch,
                "spatial_merge_size": vision.joined,
                "spatial_patch_size": vision.patch,
                "temporal_patch_size": 2,
                "window_size": vision.window,
                "fullatt_block_indexes": vision.attends,
                "tokens_per_second": 2,
            },
        }
        | {f"{name}_token_id": number for name, number in tokens.items()}
    )


def _lfm2(shape: Shape) -> dict[str, Any]:
    config: dict[str, Any] = {
        "layer_types": shape.layer_types("conv"),
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": LFM2_KERNEL,
        "conv_bias": False,
        "norm_eps": 1e-5,
    }
    if shape.experts is not None:
        config |= {
            "num_experts": shape.experts.number,
            "num_experts_per_tok": shape.experts.chosen,
            "moe_intermediate_size": shape.experts.size,
            "num_dense_layers": shape.experts.dense,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        }
    return config


LFM2_KERNEL = 3
"""Tokens that a short convolution sees."""


def _qwen3_5(shape: Shape) -> dict[str, Any]:
    assert shape.delta is not None
    return {
        "layer_types": shape.layer_types("linear_attention"),
        "linear_conv_kernel_dim": shape.delta.kernel,
        "linear_key_head_dim": shape.delta.head,
        "linear_value_head_dim": shape.delta.head,
        "linear_num_key_heads": shape.delta.heads,
        "linear_num_value_heads": shape.delta.heads,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    }


_FAMILY_CONFIG: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "qwen3_5_text": _qwen3_5,
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
    "lfm2-350m-shape": Shape(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        title="the shape of LFM2-350M (354 M parameters)",
        layers=16,
        hidden=1024,
        intermediate=4608,
        heads=16,
        kv_heads=8,
        vocabulary=65_536,
        rope_theta=1_000_000.0,
        spread=0.02,
        tied=True,
        context=_LONG,
        attends=(2, 5, 8, 10, 12, 14),
        waves=1,
        least_requests=2,
    ),
    "qwen35-08b-shape": Shape(
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        title="the shape of Qwen3.5-0.8B without images (752 M parameters)",
        layers=24,
        hidden=1024,
        intermediate=3584,
        heads=8,
        kv_heads=2,
        head_dim=256,
        vocabulary=248_320,
        rope_theta=10_000_000.0,
        spread=0.02,
        tied=True,
        context=_LONG,
        attends=(3, 7, 11, 15, 19, 23),
        delta=DeltaNet(heads=16, head=128, kernel=4),
        waves=1,
        least_requests=1,
    ),
    "qwen3-4b-shape": Shape(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        title="the shape of Qwen3-4B (4.0 G parameters)",
        layers=36,
        hidden=2560,
        intermediate=9728,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=151_936,
        rope_theta=1_000_000.0,
        spread=0.02,
        tied=True,
        context=_LONG,
        waves=1,
        least_requests=1,
    ),
    "lfm2-moe-shape": Shape(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        title="the shape of LFM2-8B-A1B with a third of its layers (2.4 G parameters)",
        layers=8,
        hidden=2048,
        intermediate=7168,
        heads=32,
        kv_heads=8,
        vocabulary=65_536,
        rope_theta=1_000_000.0,
        spread=0.02,
        tied=True,
        context=_LONG,
        attends=(2, 6),
        experts=Experts(number=32, chosen=4, size=1792, dense=2),
        waves=1,
        least_requests=1,
    ),
    "smolvlm-500m-shape": Shape(
        architecture="LlamaForCausalLM",
        model_type="llama",
        title="the shape of SmolVLM-500M (507 M parameters)",
        layers=32,
        hidden=960,
        intermediate=2560,
        heads=15,
        kv_heads=5,
        vocabulary=49_280,
        rope_theta=100_000.0,
        spread=0.02,
        tied=False,
        context=8192,
        vision=Vision(
            layers=12, hidden=768, intermediate=3072, heads=12, side=512, patch=16, joined=4, longest_edge=2048
        ),
        waves=1,
        least_requests=1,
    ),
    "qwen25-vl-shape": Shape(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        title="the shape of Qwen2.5-VL-3B with 8 of the decoder's 36 layers (1.6 G parameters)",
        layers=8,
        hidden=2048,
        intermediate=11_008,
        heads=16,
        kv_heads=2,
        vocabulary=151_936,
        rope_theta=1_000_000.0,
        spread=0.02,
        tied=True,
        biases=True,
        context=8192,
        vision=QwenVision(
            layers=32,
            hidden=1280,
            intermediate=3420,
            heads=16,
            patch=14,
            joined=2,
            window=112,
            attends=(7, 15, 23, 31),
        ),
        waves=1,
        least_requests=1,
    ),
}
