"""Image encoders as models of their own: SigLIP's vision transformer, and what makes embeddings of its patches.

Those of Idefics 3 and SmolVLM: a square tile is cut into patches, which attend to each other; the patches of a small
square are joined to one vector (pixel shuffle), and projected to the width of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.loading import Loading, Report
from penstock.engines.contract.model_info import ImageTile
from penstock.engines.contract.step import ImageRows
from penstock.engines.errors import UnsupportedError
from penstock.engines.host.cores import usable_cores
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.device import ThreadPlan, all_threads, compiled
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, f32, i64
from penstock.engines.openvino.numerics import Dtype, Numerics
from penstock.engines.openvino.weights import Weights

_ARCHITECTURES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_VISION, _PROJECTION = "model.vision_model.", "model.connector.modality_projection.proj.weight"
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""What settings mean that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    norm_eps: float
    side: int
    """Pixels of a tile."""
    patch: int
    """Pixels of a patch's side."""
    joined: int
    """So many patches in a row, and in a column, become one vector."""
    out_size: int
    """Of the decoder's hidden state."""

    @property
    def patches(self) -> int:
        """In a row of a tile."""
        return self.side // self.patch

    @property
    def tile(self) -> ImageTile:
        return ImageTile(self.side, (self.patches // self.joined) ** 2)


def vision_spec(settings: Mapping[str, Any]) -> VisionSpec | None:
    """`settings`: config.json. None: the model reads text only, or its eyes are not known here. Raises
    UnsupportedError for an encoder that cannot be run."""
    names = settings.get("architectures")
    if not isinstance(names, list) or not set(names) & set(_ARCHITECTURES):
        return None
    vision, text = (_object(settings, key) for key in ("vision_config", "text_config"))
    vision = {**_DEFAULTS, **vision}
    joined = settings.get("scale_factor", 2)
    sizes = [vision[key] for key in _DEFAULTS if isinstance(_DEFAULTS[key], int)]
    if not all(type(size) is int and 0 < size <= 1 << 20 for size in [*sizes, joined, text.get("hidden_size")]):
        raise UnsupportedError("config.json has sizes of the image encoder that are not numbers of pixels or values")
    spec = VisionSpec(
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        num_layers=vision["num_hidden_layers"],
        num_heads=vision["num_attention_heads"],
        activation=str(vision["hidden_act"]),
        norm_eps=float(vision["layer_norm_eps"]),
        side=vision["image_size"],
        patch=vision["patch_size"],
        joined=joined,
        out_size=text["hidden_size"],
    )
    _check(spec, vision["num_channels"])
    return spec


def _object(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = settings.get(key) or {}
    if not isinstance(inner, Mapping):
        raise UnsupportedError(f"config.json has {key}={str(inner)[:50]}, which is not an object")
    return inner


def _check(spec: VisionSpec, channels: int) -> None:
    if spec.side % spec.patch or spec.patches % spec.joined or spec.hidden_size % spec.num_heads or channels != 3:
        raise UnsupportedError("config.json has an image encoder whose tiles, patches or heads do not divide evenly")
    if spec.activation not in ACTIVATIONS:
        raise UnsupportedError(f"config.json has hidden_act={spec.activation[:50]!r} in vision_config")


class ImageEncoder:
    """Used by one thread at a time, beside the decoder."""

    def __init__(self, config: OpenVINOConfig, spec: VisionSpec, dtype: Dtype, report: Report) -> None:
        """`dtype`: what it is computed in. Raises UnsupportedError for a checkpoint that it cannot run, EngineError for
        a broken one."""
        self.tile = spec.tile
        self._source = _open(config, spec, dtype, report)
        plan = ThreadPlan(config.threads or all_threads(usable_cores()))
        with compiled(self._source, [plan], report) as [model]:
            self._request = model.create_infer_request()
            report(Loading("warm-up"))
            self.encode(bytes(self.tile.pixel_bytes))

    def encode(self, pixels: bytes) -> ImageRows:
        """[tiles * tokens of a tile, hidden size of the decoder]. Tile by tile, so that steps of the decoder get their
        turn between them. Releases the GIL while it computes."""
        side = self.tile.side
        tiles = np.frombuffer(pixels, np.uint8).reshape(-1, 1, side, side, 3)
        return np.concatenate([self._encode_tile(tile) for tile in tiles])

    def _encode_tile(self, tile: np.ndarray[Any, Any]) -> ImageRows:
        self._request.infer([tile])
        return np.array(self._request.get_output_tensor(0).data, np.float32)


@dataclass(frozen=True)
class _Source:
    """An encoder before it is compiled, as a `GraphSource`. Its weights stay floats: it is small beside the decoder."""

    numerics: Numerics
    spec: VisionSpec
    weights: Weights
    checkpoint: Checkpoint
    """The compiled model may look into its files."""
    has_experts: bool = False

    def make(self) -> ov.Model:
        graph = build_image_encoder(self.spec, self.weights)
        self.weights.finish()
        return graph

    def release_pages(self) -> None:
        self.weights.release_pages()


def _open(config: OpenVINOConfig, spec: VisionSpec, dtype: Dtype, report: Report) -> _Source:
    checkpoint = Checkpoint(config.model_dir, _own_name)
    if checkpoint.is_quantized:
        raise UnsupportedError("the checkpoint has an image encoder with quantized weights")
    numerics = Numerics(dtype=dtype, activations=dtype, kv=None, integers=None)
    return _Source(numerics, spec, Weights(checkpoint, "auto", report), checkpoint)


def _own_name(name: str) -> str | None:
    return name if name.startswith(_VISION) or name == _PROJECTION else None


def build_image_encoder(spec: VisionSpec, weights: Weights) -> ov.Model:
    """From a tile [1, side, side, 3] u8 to [tokens, width of the decoder] f32. Raises UnsupportedError when the
    checkpoint holds tensors that this graph would ignore."""
    tile = ops.parameter([1, spec.side, spec.side, 3], np.uint8)
    builder = _Builder(spec, weights)
    x = builder.patches(tile)
    for n in range(spec.num_layers):
        x = builder.layer(x, f"{_VISION}encoder.layers.{n}.")
    x = builder.norm(x, _VISION + "post_layernorm")
    x = _pixel_shuffled(x, spec)
    x = weights.project(x, _PROJECTION, (spec.out_size, spec.hidden_size * spec.joined**2))
    ignored = weights.unused()
    if ignored:
        raise UnsupportedError(f"the checkpoint has {len(ignored)} tensors of an image encoder of another kind")
    return ov.Model([ops.result(x)], [tile], "image encoder")


class _Builder:
    def __init__(self, spec: VisionSpec, weights: Weights) -> None:
        self._spec = spec
        self._weights = weights

    def patches(self, tile: Node) -> Node:
        """[patches of the tile, hidden size], with their positions."""
        spec, prefix = self._spec, _VISION + "embeddings."
        # from 0..255 to -1..1, as the mean and the deviation of all published processors have it
        x = ops.subtract(ops.multiply(ops.convert(tile, "f32"), f32(2 / 255)), f32(1.0))
        x = ops.transpose(x, i64([0, 3, 1, 2]))
        kernel = self._weights.table(prefix + "patch_embedding.weight", (spec.hidden_size, 3, spec.patch, spec.patch))
        stride = [spec.patch, spec.patch]
        x = ops.convolution(x, kernel, stride, [0, 0], [0, 0], [1, 1])
        x = ops.transpose(ops.reshape(x, i64([spec.hidden_size, -1]), False), i64([1, 0]))
        x = ops.add(x, self._weights.vector(prefix + "patch_embedding.bias", spec.hidden_size))
        positions = self._weights.table(prefix + "position_embedding.weight", (spec.patches**2, spec.hidden_size))
        # transformers finds the rows by fractions in f32. For some numbers of patches, none of them in use, these are
        # rounded differently on different CPUs.
        return ops.add(x, positions)

    def layer(self, x: Node, prefix: str) -> Node:
        spec, hidden = self._spec, self._spec.hidden_size
        y = self.norm(x, prefix + "layer_norm1")
        q, k, v = (self._heads(self._linear(y, f"{prefix}self_attn.{name}_proj", hidden, hidden)) for name in "qkv")
        y = ops.scaled_dot_product_attention(q, k, v)
        y = ops.reshape(ops.transpose(y, i64([0, 2, 1, 3])), i64([-1, hidden]), False)
        x = ops.add(x, self._linear(y, prefix + "self_attn.out_proj", hidden, hidden))
        y = self._linear(self.norm(x, prefix + "layer_norm2"), prefix + "mlp.fc1", spec.intermediate_size, hidden)
        y = ACTIVATIONS[spec.activation](y)  # type: ignore[index]  # checked with the settings
        return ops.add(x, self._linear(y, prefix + "mlp.fc2", hidden, spec.intermediate_size))

    def norm(self, x: Node, name: str) -> Node:
        size = self._spec.hidden_size
        x = ops.mvn(x, i64([-1]), True, self._spec.norm_eps, "inside_sqrt")
        return ops.add(
            ops.multiply(x, self._weights.vector(name + ".weight", size)), self._weights.vector(name + ".bias", size)
        )

    def _linear(self, x: Node, name: str, out: int, inner: int) -> Node:
        y = self._weights.project(x, name + ".weight", (out, inner))
        return ops.add(y, self._weights.vector(name + ".bias", out))

    def _heads(self, x: Node) -> Node:
        """[patches, hidden size] to [1, heads, patches, size of a head]."""
        heads = self._spec.num_heads
        x = ops.reshape(x, i64([1, -1, heads, self._spec.hidden_size // heads]), False)
        return ops.transpose(x, i64([0, 2, 1, 3]))


def _pixel_shuffled(x: Node, spec: VisionSpec) -> Node:
    """[patches of the tile, hidden size] to [tokens, joined * joined * hidden size]."""
    side, few = spec.patches // spec.joined, spec.joined
    x = ops.reshape(x, i64([side, few, side, few * spec.hidden_size]), False)
    return ops.reshape(ops.transpose(x, i64([0, 2, 1, 3])), i64([side * side, -1]), False)
