"""The seam of image encoders, and the parts that their graphs are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder_inputs import ImageInputs
from penstock.engines.openvino.decoder_spec import Activation
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, f32, i64, parts, rms
from penstock.engines.openvino.weights import Weights

HALVES = (0.5,) * 3
"""Mean and deviation of pixels with most encoders."""
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""The same with those that take CLIP's."""
UNEVEN = "config.json has an image encoder whose tiles, patches or heads do not divide evenly"
_MOST = 1 << 20
"""Larger sizes in config.json are mistakes."""


class VisionModel(ABC):
    """A family's encoder, as config.json describes it: what makes rows for the decoder of a tile's pixels."""

    architectures: ClassVar[tuple[str, ...]]
    prefixes: ClassVar[tuple[str, ...]]
    """Of its tensors' names, as `own_name` has them."""
    whole_tiles: bool = False
    """In the decoder, the tokens of a tile attend to each other in both directions (`ModelInfo.whole_tiles`)."""
    whole_in_windows: ClassVar[bool] = False
    """In its layers with a window alone."""

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


def checked_number(settings: Mapping[str, Any], key: str, usual: float) -> float:
    """Raises UnsupportedError for what is no positive number."""
    number = settings.get(key, usual)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < _MOST:
        raise UnsupportedError(f"config.json has {key}={str(number)[:50]} for its image encoder")
    return float(number)


def checked_activation(settings: Mapping[str, Any], key: str, usual: str) -> Activation:
    """Raises UnsupportedError for one that is not known here."""
    name = settings.get(key, usual)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(f"config.json has {key}={str(name)[:50]!r} for its image encoder")
    return name  # type: ignore[return-value]  # checked above


class VisionGraph:
    """Nodes with weights. Names are those of modules."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def patches(self, values: Node, name: str, size: int, patch: int) -> Node:
        """[1, 3, height, width] to [1, size, rows, columns], without a bias."""
        kernel = self.weights.table(name + ".weight", (size, 3, patch, patch))
        return ops.convolution(values, kernel, [patch] * 2, [0, 0], [0, 0], [1, 1])

    def linear(self, x: Node, name: str, out: int, inner: int, *, bias: bool = True) -> Node:
        y = self.weights.project(x, name + ".weight", (out, inner))
        return ops.add(y, self.weights.vector(name + ".bias", out)) if bias else y

    def layer_norm(self, x: Node, name: str, size: int, eps: float) -> Node:
        x = ops.multiply(ops.mvn(x, i64([-1]), True, eps, "inside_sqrt"), self.weights.vector(name + ".weight", size))
        return ops.add(x, self.weights.vector(name + ".bias", size))

    def rms_norm(self, x: Node, name: str, size: int, eps: float, *, plus: float = 0.0) -> Node:
        """`plus` is added to its weights."""
        return ops.multiply(rms(x, eps), self.weights.vector(name + ".weight", size, plus=plus))


def normalized(tile: Node, mean: Sequence[float], deviation: Sequence[float]) -> Node:
    """[1, height, width, 3] in 8 bits to [1, 3, height, width]; black is 0 and white 1 before it is normed."""
    factor, shift = 1 / (255 * np.array(deviation)), np.array(mean) / np.array(deviation)
    values = ops.subtract(ops.multiply(ops.convert(tile, "f32"), f32(factor)), f32(shift))
    return ops.transpose(values, i64([0, 3, 1, 2]))


def rotated(x: Node, cos: Node, sin: Node, size: int) -> Node:
    """x [..., size], whose two halves turn together."""
    first, second = parts(x, (size // 2, size // 2), -1)
    return ops.add(ops.multiply(x, cos), ops.multiply(ops.concat([ops.negative(second), first], -1), sin))


def by_head(x: Node, heads: int, size: int, window: int = 0) -> Node:
    """[patches, heads * size] to [1, heads, patches, size]. `window`: to [windows, heads, window, size], if they have
    so many patches each."""
    shape = [-1, window, heads, size] if window else [1, -1, heads, size]
    return ops.transpose(ops.reshape(x, i64(shape), False), i64([0, 2, 1, 3]))


def attention(q: Node, k: Node, v: Node, size: int, *mask: Node) -> Node:
    """All patches attend to all, or to those of their window: [windows, heads, window, size of a head] to
    [patches, size]. `mask` is added to scores."""
    y = ops.scaled_dot_product_attention(q, k, v, *mask)
    return ops.reshape(ops.transpose(y, i64([0, 2, 1, 3])), i64([-1, size]), False)


def joined_squares(x: Node, columns: Node, few: int, size: int) -> Node:
    """[patches, size] to [tokens, few * few * size]: the patches of a square of few x few make one vector, line by line
    (pixel shuffle). `columns` [1]: of such squares."""
    x = ops.reshape(x, ops.concat([i64([-1, few]), columns, i64([few * size])], 0), False)
    return ops.reshape(ops.transpose(x, i64([0, 2, 1, 3])), i64([-1, few * few * size]), False)
