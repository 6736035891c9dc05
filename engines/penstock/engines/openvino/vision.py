"""The seam of image encoders, and the vision transformer that several of them have: SigLIP's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_inputs import ImageInputs
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, f32, i64
from penstock.engines.openvino.weights import Weights

UNEVEN = "config.json has an image encoder whose tiles, patches or heads do not divide evenly"
_MOST = 1 << 20
"""Larger sizes in config.json are mistakes."""


class VisionModel(ABC):
    """A family's encoder, as config.json describes it: what makes rows for the decoder of a tile's pixels."""

    architectures: ClassVar[tuple[str, ...]]
    prefixes: ClassVar[tuple[str, ...]]
    """Of its tensors' names, as `own_name` has them."""
    whole_tiles: ClassVar[bool] = False
    """In the decoder, the tokens of a tile attend to each other in both directions (`ModelInfo.whole_tiles`)."""

    deepstack: int = 0
    """As `ImageInputs` has it: rows for the decoder are so many hidden states wider."""
    has_grid_positions: ClassVar[bool] = False
    """As `ModelInfo` has it."""

    @classmethod
    @abstractmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """`settings`: config.json. Raises UnsupportedError for an encoder that cannot be run."""

    @property
    @abstractmethod
    def grid(self) -> ImageGrid: ...

    def own_name(self, name: str) -> str | None:
        """Of a tensor in the files, which releases of transformers write differently; None: it is no part of this."""
        name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
        return name if name.startswith(self.prefixes) else None

    def inputs(self, tile: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """Of the graph, for a tile [1, height, width, 3]."""
        return [tile]

    def decoder_inputs(self, width: int) -> ImageInputs:
        """`width`: of the decoder's hidden state."""
        return ImageInputs(width, self.deepstack, self.has_grid_positions)

    @abstractmethod
    def graph(self, weights: Weights) -> ov.Model:
        """From `inputs` to [tokens, width of rows for the decoder] f32."""


def inner_settings(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Raises UnsupportedError for what is no object."""
    inner = settings.get(key) or {}
    if not isinstance(inner, Mapping):
        raise UnsupportedError(f"config.json has {key}={str(inner)[:50]}, which is not an object")
    return inner


def checked_size(settings: Mapping[str, Any], key: str, usual: int | None = None) -> int:
    """Raises UnsupportedError for what is no number of pixels, values or layers."""
    size = settings.get(key, usual)
    if type(size) is not int or not 0 < size <= _MOST:
        raise UnsupportedError(f"config.json has {key}={str(size)[:50]} for its image encoder, which is not a size")
    return size


SIGLIP_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""What settings mean that config.json leaves out."""


@dataclass(frozen=True, kw_only=True)
class Siglip:
    """A vision transformer: a square tile is cut into patches, which attend to each other."""

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

    @classmethod
    def of(cls, vision: Mapping[str, Any], defaults: Mapping[str, Any]) -> Siglip:
        """`defaults`: what settings mean that config.json leaves out. Raises UnsupportedError."""
        vision = {**defaults, **vision}
        spec = cls(
            hidden_size=checked_size(vision, "hidden_size"),
            intermediate_size=checked_size(vision, "intermediate_size"),
            num_layers=checked_size(vision, "num_hidden_layers"),
            num_heads=checked_size(vision, "num_attention_heads"),
            activation=str(vision["hidden_act"]),
            norm_eps=float(vision["layer_norm_eps"]),
            side=checked_size(vision, "image_size"),
            patch=checked_size(vision, "patch_size"),
        )
        if spec.side % spec.patch or spec.hidden_size % spec.num_heads or vision["num_channels"] != 3:
            raise UnsupportedError(UNEVEN)
        if spec.activation not in ACTIVATIONS:
            raise UnsupportedError(f"config.json has hidden_act={spec.activation[:50]!r} in vision_config")
        return spec

    @property
    def patches(self) -> int:
        """In a row of a tile."""
        return self.side // self.patch


class SiglipGraph:
    def __init__(self, spec: Siglip, weights: Weights, prefix: str) -> None:
        """`prefix`: of the names of all its tensors."""
        self._spec = spec
        self._weights = weights
        self._prefix = prefix

    def encoded(self, tile: Node) -> Node:
        """[patches of the tile, hidden size], of a tile [1, side, side, 3] u8."""
        x = self.patches(tile)
        for n in range(self._spec.num_layers):
            x = self.layer(x, f"{self._prefix}encoder.layers.{n}.")
        return self.norm(x, self._prefix + "post_layernorm")

    def patches(self, tile: Node) -> Node:
        """[patches of the tile, hidden size], with their positions."""
        spec, prefix = self._spec, self._prefix + "embeddings."
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
