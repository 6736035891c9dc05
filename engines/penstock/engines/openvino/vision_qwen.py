"""The image encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: a vision transformer for pictures of any size.

A picture is a grid of patches, of which each square of some becomes one token (arXiv:2409.12191). Queries and keys are
rotated by rows in one half of the pairs, and by columns in the other. Qwen2.5-VL's patches attend to those of a window,
but for some layers (arXiv:2502.13923). Qwen3-VL adds learned positions, and hands vectors out of some layers to the
decoder's first ones (deepstack, arXiv:2406.04334).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.contract.model_info import ImageGrid
from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.model_settings import text_settings
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.graph_nodes import ACTIVATIONS, Node, f32, i64, parts
from penstock.engines.openvino.vision import (
    CLIP,
    HALVES,
    VisionGraph,
    VisionModel,
    attention,
    by_head,
    checked_size,
    inner_settings,
    rotated,
)
from penstock.engines.openvino.weights import Weights

_PREFIX = "visual."
_EPS = 1e-6
_THETA = 10000.0
_FRAMES = 2
"""That a patch has; of a picture, all are the same."""
_FAR = float(np.finfo(np.float32).min)

Values = npt.NDArray[np.float32]


class _Names(NamedTuple):
    """Of the parts that are called differently."""

    mlp: tuple[str, ...]
    """What comes before the activation: a gate and its values, or one matrix; the last is behind it."""
    merger_norm: str
    merger: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class QwenVision(VisionModel):
    """Qwen2-VL's, and what the others have in common with it."""

    architectures: ClassVar[tuple[str, ...]] = ("Qwen2VLForConditionalGeneration",)
    prefixes = (_PREFIX,)
    names = _Names(("mlp.fc1", "mlp.fc2"), "ln_q", ("mlp.0", "mlp.2"))
    has_grid_positions = True
    pixel_values = CLIP
    """Mean and deviation of each colour, of values from 0 to 1."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    patch: int
    """Pixels of a patch's side."""
    joined: int
    """So many patches in a row, and in a column, become one token."""
    out_size: int
    """Of the decoder's hidden state."""
    window: int = 0
    """Tokens in a row, and in a column, of what patches attend to; 0: all."""
    attends_to_all: tuple[int, ...] = ()
    """Layers without windows."""
    positions: int = 0
    """Learned ones in a row, and in a column; 0: there are none."""
    taps: tuple[int, ...] = ()
    """Layers that deepstack takes vectors behind."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        vision = inner_settings(settings, "vision_config")
        spec = cls(**cls._fields(vision), out_size=checked_size(text_settings(settings), "hidden_size"))
        if spec.hidden_size % (4 * spec.num_heads):
            raise UnsupportedError("config.json has an image encoder whose heads do not divide evenly")
        if spec.activation not in (*ACTIVATIONS, _QUICK):
            raise UnsupportedError(f"config.json has hidden_act={spec.activation[:50]!r} in vision_config")
        if vision.get("temporal_patch_size", _FRAMES) != _FRAMES or vision.get("in_channels", 3) != 3:
            raise UnsupportedError("config.json has an image encoder with patches of another kind")
        if any(rope is not None and not rope.axes for rope in parse_config(settings).ropes):
            raise UnsupportedError("mrope_section in config.json does not share out the pairs of a head")
        return spec

    @classmethod
    def _fields(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        width = checked_size(vision, "embed_dim", 1280)
        ratio = checked_size(vision, "mlp_ratio", 4)
        return cls._common(vision, _QUICK, 14) | {"hidden_size": width, "intermediate_size": width * ratio}

    @classmethod
    def _common(cls, vision: Mapping[str, Any], activation: str, patch: int, layers: int = 32) -> dict[str, Any]:
        """With these where config.json says nothing."""
        return {
            "num_layers": checked_size(vision, "depth", layers),
            "num_heads": checked_size(vision, "num_heads", 16),
            "activation": str(vision.get("hidden_act", activation)),
            "patch": checked_size(vision, "patch_size", patch),
            "joined": checked_size(vision, "spatial_merge_size", 2),
        }

    @property
    def grid(self) -> ImageGrid:
        return ImageGrid(self.patch * self.joined)

    @property
    def deepstack(self) -> int:  # type: ignore[override]
        return len(self.taps)

    def inputs(self, tile: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """Patches [P, 3 * patch * patch], square by square; cos and sin of their angles [P, 1, head size]; with windows
        what `windows` gives; with learned positions, for each patch four of them [P, 4], and their shares [P, 4, 1]."""
        few, patch = self.joined, self.patch
        _, height, width, _ = tile.shape
        rows, columns = height // patch, width // patch
        x = tile.reshape(rows // few, few, patch, columns // few, few, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        places = np.indices((rows, columns)).reshape(2, rows // few, few, columns // few, few)
        places = places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        inputs: list[npt.NDArray[Any]] = [np.ascontiguousarray(x).reshape(rows * columns, -1), *self._turns(places)]
        if self.window:
            inputs += windows(rows // few, columns // few, self.window, few**2)
        if self.positions:
            inputs += interpolated(places, (rows, columns), self.positions)
        return inputs

    def _turns(self, places: npt.NDArray[Any]) -> list[Values]:
        size = self.hidden_size // self.num_heads // 2
        inv_freq = 1 / np.float32(_THETA) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))
        angles = (places[:, :, None].astype(np.float32) * inv_freq).reshape(len(places), 1, size)
        angles = np.concatenate([angles, angles], -1)
        return [np.cos(angles), np.sin(angles)]

    def graph(self, weights: Weights) -> ov.Model:
        return _Graph(self, weights).built()


@dataclass(frozen=True, kw_only=True)
class Qwen25Vision(QwenVision):
    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    names = _Names(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), "ln_q", ("mlp.0", "mlp.2"))

    @classmethod
    def _fields(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        fields = cls._common(vision, "silu", 14)
        cell = fields["patch"] * fields["joined"]
        window = checked_size(vision, "window_size", 112) // cell
        if not window:
            raise UnsupportedError("config.json has an image encoder whose windows are smaller than a token")
        return fields | {
            "hidden_size": checked_size(vision, "hidden_size", 3584),
            "intermediate_size": checked_size(vision, "intermediate_size", 3420),
            "window": window,
            "attends_to_all": _layers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3Vision(QwenVision):
    architectures = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
    names = _Names(("mlp.linear_fc1", "mlp.linear_fc2"), "norm", ("linear_fc1", "linear_fc2"))
    pixel_values = HALVES, HALVES

    @classmethod
    def _fields(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        count = checked_size(vision, "num_position_embeddings", 2304)
        side = int(count**0.5)
        if side * side != count or side < 2:
            raise UnsupportedError(f"config.json has num_position_embeddings={count}, which are not those of a square")
        return cls._common(vision, "gelu_pytorch_tanh", 16, 27) | {
            "hidden_size": checked_size(vision, "hidden_size", 1152),
            "intermediate_size": checked_size(vision, "intermediate_size", 4304),
            "positions": side,
            "taps": cls._taps(vision),
        }

    @classmethod
    def _taps(cls, vision: Mapping[str, Any]) -> tuple[int, ...]:
        return _layers(vision, "deepstack_visual_indexes", (8, 16, 24))


@dataclass(frozen=True, kw_only=True)
class Qwen35Vision(Qwen3Vision):
    """Qwen3-VL's, without deepstack."""

    architectures = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")

    @classmethod
    def _taps(cls, vision: Mapping[str, Any]) -> tuple[int, ...]:
        return ()


def _layers(vision: Mapping[str, Any], key: str, usual: Sequence[int]) -> tuple[int, ...]:
    layers = vision.get(key, usual)
    if not isinstance(layers, list | tuple) or not all(type(n) is int and n >= 0 for n in layers):
        raise UnsupportedError(f"config.json has {key}={str(layers)[:50]}, which are not numbers of layers")
    return tuple(layers)


def windows(rows: int, columns: int, window: int, patches: int) -> list[npt.NDArray[Any]]:
    """The windows of a grid of tokens with so many patches each: which patches they have, [W * n] i64, one window after
    another; what is added to scores there [W, 1, 1, n], far below zero where a window at the edge has none; and of each
    patch where it is in the first [P] i64."""
    high, wide = -(-rows // window), -(-columns // window)
    numbers = np.full((high * window, wide * window), -1)
    numbers[:rows, :columns] = np.arange(rows * columns).reshape(rows, columns)
    numbers = numbers.reshape(high, window, wide, window).transpose(0, 2, 1, 3).reshape(high * wide, -1)
    has = np.repeat(numbers >= 0, patches, axis=1)
    members = (np.maximum(numbers, 0)[:, :, None] * patches + np.arange(patches)).reshape(-1)
    back = np.empty(rows * columns * patches, np.int64)
    inside = np.flatnonzero(has)
    back[members[inside]] = inside
    mask = np.where(has, np.float32(0), np.float32(_FAR))[:, None, None, :]
    return [members, mask, back]


def interpolated(places: npt.NDArray[Any], shape: tuple[int, int], side: int) -> list[npt.NDArray[Any]]:
    """Of a square of learned positions, the four around each patch [P, 4] i64, and their shares [P, 4, 1], if the
    square is stretched so that its corners are those of the grid of patches (`shape`)."""
    scale = np.maximum(np.array(shape) - 1, 1)
    exact = places.astype(np.float32) * np.float32(side - 1) / scale.astype(np.float32)
    first = np.floor(exact)
    share = exact - first
    both = np.stack([first, np.minimum(first + 1, side - 1)], -1).astype(np.int64)
    shares = np.stack([1 - share, share], -1)
    rows, columns = both[:, 0, :, None], both[:, 1, None, :]
    weights = shares[:, 0, :, None] * shares[:, 1, None, :]
    return [(rows * side + columns).reshape(-1, 4), weights.reshape(-1, 4, 1).astype(np.float32)]


_QUICK = "quick_gelu"


def _activated(x: Node, activation: str) -> Node:
    if activation == _QUICK:
        return ops.multiply(x, ops.sigmoid(ops.multiply(x, f32(1.702))))
    return ACTIVATIONS[activation](x)


class _Graph(VisionGraph):
    def __init__(self, spec: QwenVision, weights: Weights) -> None:
        super().__init__(weights)
        self._spec = spec
        self._head_dim = spec.hidden_size // spec.num_heads
        self._is_rms = isinstance(spec, Qwen25Vision)
        self._tile = ops.parameter([-1, 3 * spec.patch**2], np.uint8)
        self._cos, self._sin = (ops.parameter([-1, 1, self._head_dim], np.float32) for _ in range(2))
        slots = (spec.window * spec.joined) ** 2
        self._windows: list[Node] = []
        if spec.window:
            kinds: list[tuple[list[int], Any]] = [([-1], np.int64), ([-1, 1, 1, slots], np.float32), ([-1], np.int64)]
            self._windows = [ops.parameter(shape, kind) for shape, kind in kinds]
        self._places: list[Node] = []
        if spec.positions:
            self._places = [ops.parameter([-1, 4], np.int64), ops.parameter([-1, 4, 1], np.float32)]

    def built(self) -> ov.Model:
        spec, outputs = self._spec, []
        x = self._patches()
        for n in range(spec.num_layers):
            x = self._layer(x, n)
            if n in spec.taps:
                outputs.append(self._tapped(x, spec.taps.index(n)))
        outputs.insert(0, self._merged(x))
        y = ops.concat(outputs, 1) if len(outputs) > 1 else outputs[0]
        inputs = [self._tile, self._cos, self._sin, *self._windows, *self._places]
        return ov.Model([ops.result(y)], inputs, "image encoder")

    def _patches(self) -> Node:
        """[P, hidden size]"""
        spec, pixels = self._spec, self._spec.patch**2
        mean, deviation = (np.repeat(np.array(values), pixels)[None] for values in spec.pixel_values)
        x = ops.multiply(ops.convert(self._tile, "f32"), f32(1 / (255 * deviation)))
        x = ops.subtract(x, f32(mean / deviation))
        name = _PREFIX + "patch_embed.proj"
        kernel = self.weights.table(name + ".weight", (spec.hidden_size, 3, _FRAMES, spec.patch, spec.patch))
        kernel = ops.reshape(ops.reduce_sum(kernel, i64([2]), False), i64([spec.hidden_size, -1]), False)
        x = ops.matmul(x, kernel, False, True)
        if not self._places:
            return x
        x = ops.add(x, self.weights.vector(name + ".bias", spec.hidden_size))
        table = self.weights.table(_PREFIX + "pos_embed.weight", (spec.positions**2, spec.hidden_size))
        four = ops.multiply(ops.gather(table, self._places[0], i64(0)), self._places[1])
        return ops.add(x, ops.reduce_sum(four, i64([1]), False))

    def _layer(self, x: Node, n: int) -> Node:
        spec, prefix = self._spec, f"{_PREFIX}blocks.{n}."
        x = ops.add(x, self._attention(self._norm(x, prefix + "norm1"), n, prefix + "attn."))
        y = self._norm(x, prefix + "norm2")
        *first, last = spec.names.mlp
        inner = [self.linear(y, prefix + name, spec.intermediate_size, spec.hidden_size) for name in first]
        y = _activated(inner[0], spec.activation)
        y = ops.multiply(y, inner[1]) if len(inner) > 1 else y
        return ops.add(x, self.linear(y, prefix + last, spec.hidden_size, spec.intermediate_size))

    def _attention(self, x: Node, n: int, prefix: str) -> Node:
        hidden, heads, d = self._spec.hidden_size, self._spec.num_heads, self._head_dim
        qkv = parts(self.linear(x, prefix + "qkv", 3 * hidden, hidden), (hidden,) * 3, 1)
        q, k, v = (ops.reshape(one, i64([-1, heads, d]), False) for one in qkv)
        q, k = (rotated(one, self._cos, self._sin, d) for one in (q, k))
        if not self._windows or n in self._spec.attends_to_all:
            q, k, v = (by_head(one, heads, d) for one in (q, k, v))
            return self.linear(attention(q, k, v, hidden), prefix + "proj", hidden, hidden)
        members, mask, back = self._windows
        slots = (self._spec.window * self._spec.joined) ** 2
        q, k, v = (by_head(ops.gather(one, members, i64(0)), heads, d, slots) for one in (q, k, v))
        y = ops.gather(attention(q, k, v, hidden, mask), back, i64(0))
        return self.linear(y, prefix + "proj", hidden, hidden)

    def _merged(self, x: Node) -> Node:
        prefix, wide = _PREFIX + "merger.", self._spec.hidden_size * self._spec.joined**2
        x = self._norm(x, prefix + self._spec.names.merger_norm)
        return self._joined(ops.reshape(x, i64([-1, wide]), False), prefix)

    def _tapped(self, x: Node, number: int) -> Node:
        prefix, wide = f"{_PREFIX}deepstack_merger_list.{number}.", self._spec.hidden_size * self._spec.joined**2
        x = ops.reshape(x, i64([-1, wide]), False)
        return self._joined(self._norm(x, prefix + self._spec.names.merger_norm, wide), prefix)

    def _joined(self, x: Node, prefix: str) -> Node:
        """[tokens, width of the decoder]"""
        wide = self._spec.hidden_size * self._spec.joined**2
        first, second = self._spec.names.merger
        y = ops.gelu(self.linear(x, prefix + first, wide, wide), "erf")
        return self.linear(y, prefix + second, self._spec.out_size, wide)

    def _norm(self, x: Node, name: str, size: int = 0) -> Node:
        """`size` 0: that of a patch."""
        norm = self.rms_norm if self._is_rms else self.layer_norm
        return norm(x, name, size or self._spec.hidden_size, _EPS)
