"""A decoder's graph, of the kind that its model needs: plain, with images, or with several hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.decoder import DecoderBuilder, FeatureTap, check_all_used
from penstock.engines.openvino.decoder_inputs import EMBEDDINGS, EMBEDDINGS_AT, GRID_POSITIONS, ImageInputs
from penstock.engines.openvino.decoder_spec import AltUp, DecoderSpec, LayerEmbeddings
from penstock.engines.openvino.graph_nodes import Node, f32, i32, i64, parts, scaled
from penstock.engines.openvino.lora import Projection
from penstock.engines.openvino.rope import Frequencies, Rope
from penstock.engines.openvino.vision import VisionModel
from penstock.engines.openvino.weights import Weights


def build_decoder(
    spec: DecoderSpec,
    weights: Weights,
    precision: str,
    *,
    lora: bool = False,
    tap: FeatureTap | None = None,
    vision: VisionModel | None = None,
) -> tuple[ov.Model, dict[str, Projection]]:
    """The model, and by path the projections that adapters may change: none without `lora`. `precision` of the
    computation: bf16, f16 or f32. `tap`: there is an output for a draft head. `vision`: there are inputs for what
    this makes of images. Raises UnsupportedError when the checkpoint holds tensors that this graph would ignore."""
    builder = _builder_for(vision, spec, weights, precision, lora, tap)
    model = builder.build()
    check_all_used(spec, weights)
    return model, builder.lora.projections if builder.lora else {}


def _builder_for(
    vision: VisionModel | None,
    spec: DecoderSpec,
    weights: Weights,
    precision: str,
    lora: bool,
    tap: FeatureTap | None,
) -> DecoderBuilder:
    if vision is None:
        plain = DecoderBuilder if spec.altup is None else AltUpDecoderBuilder
        return plain(spec, weights, precision, lora, tap)
    kind = EmbeddingDecoderBuilder
    if vision.whole_tiles:
        kind = TilesInWindowsDecoderBuilder if vision.whole_in_windows else WholeTileDecoderBuilder
    return kind(vision.decoder_inputs(spec.hidden_size), spec, weights, precision, lora, tap)


class EmbeddingDecoderBuilder(DecoderBuilder):
    """Some of its tokens are read as embeddings that the step has."""

    def __init__(
        self,
        images: ImageInputs,
        spec: DecoderSpec,
        weights: Weights,
        precision: str,
        lora: bool,
        tap: FeatureTap | None,
    ) -> None:
        super().__init__(spec, weights, precision, lora, tap)
        self._images = images

    def _begin(self) -> None:
        for name, (dtype, shape) in self._images.kinds.items():
            self._add_input(name, dtype, shape)
        super()._begin()

    def _embed(self) -> Node:
        return ops.scatter_update(super()._embed(), self._inputs[EMBEDDINGS_AT], self._rows_of_images(0), i64(0))

    def _ids_for_layers(self, own: LayerEmbeddings) -> Node:
        places = self._inputs[EMBEDDINGS_AT]
        ids = ops.broadcast(i64(own.token_of_images), ops.shape_of(places))
        return ops.scatter_update(super()._ids_for_layers(own), places, ids, i64(0))

    def _layer(self, x: Node, n: int) -> Node:
        x = super()._layer(x, n)
        if n >= self._images.deepstack:
            return x
        places = self._inputs[EMBEDDINGS_AT]
        added = ops.add(ops.gather(x, places, i64(0)), self._rows_of_images(1 + n))
        return ops.scatter_update(x, places, added, i64(0))

    def _rows_of_images(self, number: int) -> Node:
        """[E, hidden size]: those of the embeddings, or of a layer behind them."""
        rows, count = self._inputs[EMBEDDINGS], self._images.deepstack
        return parts(rows, (self._spec.hidden_size,) * (1 + count), 1)[number] if count else rows

    def _turning(self, rope: Rope) -> tuple[Node, Frequencies]:
        if not self._images.has_grid_positions:
            return super()._turning(rope)
        by_position = np.where(np.arange(3) == np.array(rope.axes)[:, None], rope.inv_freq[:, None], np.float32(0))
        return ops.unsqueeze(self._inputs[GRID_POSITIONS], i64(2)), by_position


class WholeTileDecoderBuilder(EmbeddingDecoderBuilder):
    """Tokens of a tile attend to each other in both directions."""

    def _begin(self) -> None:
        super()._begin()
        tokens, places = self._inputs["input_ids"], self._inputs[EMBEDDINGS_AT]
        none, ones = (ops.broadcast(i32(n), ops.shape_of(x)) for n, x in enumerate((tokens, places)))
        self._in_tiles = ops.scatter_update(none, places, ones, i64(0))

    def _token_kinds(self, n: int) -> Node | None:
        return self._in_tiles


class TilesInWindowsDecoderBuilder(WholeTileDecoderBuilder):
    """They do so in layers with a window."""

    def _token_kinds(self, n: int) -> Node | None:
        return self._in_tiles if self._spec.attention[n].window else None


class AltUpDecoderBuilder(DecoderBuilder):
    """Its hidden states are several (`AltUp`): [T, count, hidden size]."""

    def _first_state(self, x: Node) -> Node:
        if self._tap is not None:
            raise UnsupportedError("a draft head cannot read the hidden states of this family: there are several")
        x = super()._first_state(x)
        further = [self._square("model.altup_projections", n, x) for n in range(self._altup.count - 1)]
        return self._joined([x, *(self._as_large(one, x) for one in further)])

    @property
    def _altup(self) -> AltUp:
        altup = self._spec.altup
        assert altup is not None
        return altup

    def _chosen(self, x: Node) -> Node:
        """Joined before they are chosen: adapters have the rows of all tokens."""
        first, *further = self._states(x)
        further = [self._square("model.altup_unembed_projections", n, one) for n, one in enumerate(further)]
        alike = self._joined([first, *(self._as_large(one, first) for one in further)])
        return super()._chosen(ops.reduce_mean(alike, i64([1]), False))

    def _layer(self, x: Node, n: int) -> Node:
        layer, prefix = self._spec.layers[n], f"{self._spec.names.layers}.{n}."
        own, norms = self._spec.embeddings_of_layers, layer.norms
        assert own is not None
        predicted = self._predicted(x, prefix + "altup.")
        active = self._states(predicted)[self._altup.active]
        normed = self._layer_norm(active, n, norms.before_attention)
        y = ops.add(active, self._layer_norm(self._mixer(normed, n), n, norms.after_attention))
        y = scaled(ops.add(y, self._laurel(normed, n, prefix + "laurel.")), 2**-0.5)
        mlp = self._parts.mlp(self._layer_norm(y, n, norms.before_mlp), n)
        y = ops.add(y, self._layer_norm(mlp, n, norms.after_mlp))
        corrected = self._states(self._corrected(predicted, y, active, prefix + "altup."))
        first = corrected[self._altup.active]
        scale = self._weights.vector(prefix + "altup.correct_output_scale", self._spec.hidden_size)
        if self._altup.scales_output:
            first = ops.multiply(first, scale)
        added = self._own_embedding(first, n, own)
        return self._joined([corrected[0], *(ops.add(one, added) for one in corrected[1:])])

    def _predicted(self, x: Node, prefix: str) -> Node:
        count = self._altup.count
        kinds = self._kinds(self._states(x)[self._altup.active], prefix)
        shares = self._table(kinds, prefix + "prediction_coefs", count * count, count)
        shares = ops.reshape(shares, i64([0, count, count]), True)
        return ops.add(x, ops.matmul(shares, x, False, False))

    def _corrected(self, predicted: Node, y: Node, active: Node, prefix: str) -> Node:
        """`y`: what has become of the `active` one."""
        count = self._altup.count
        shares = self._table(self._kinds(y, prefix), prefix + "correction_coefs", count, count)
        shares = ops.unsqueeze(ops.add(shares, f32(1.0)), i64(2))
        return ops.add(predicted, ops.multiply(shares, ops.unsqueeze(ops.subtract(y, active), i64(1))))

    def _kinds(self, x: Node, prefix: str) -> Node:
        """[T, count]"""
        hidden = self._spec.hidden_size
        normed = scaled(self._parts.norm(x, prefix + "router_norm", hidden), 1 / hidden)
        return ops.tanh(self._table(normed, prefix + "modality_router", self._altup.count, hidden))

    def _laurel(self, x: Node, n: int, prefix: str) -> Node:
        rank, hidden = self._altup.laurel_rank, self._spec.hidden_size
        y = self._parts.linear(x, prefix + "linear_left", rank, hidden, False)
        y = self._parts.linear(y, prefix + "linear_right", hidden, rank, False)
        return ops.add(x, self._layer_norm(y, n, "laurel.post_laurel_norm"))

    def _states(self, x: Node) -> list[Node]:
        """Each one [T, hidden size]."""
        return [ops.squeeze(one, i64(1)) for one in parts(x, (1,) * self._altup.count, 1)]

    def _joined(self, states: Sequence[Node]) -> Node:
        return ops.concat([ops.unsqueeze(one, i64(1)) for one in states], 1)

    def _square(self, name: str, n: int, x: Node) -> Node:
        return self._parts.linear(x, f"{name}.{n}", self._spec.hidden_size, self._spec.hidden_size, False)

    def _table(self, x: Node, name: str, out: int, inner: int) -> Node:
        """x times a small matrix, which is never rounded."""
        return ops.matmul(x, self._weights.table(name + ".weight", (out, inner)), False, True)

    def _as_large(self, y: Node, x: Node) -> Node:
        """`y` with the mean square of x."""
        of_x, of_y = (ops.reduce_mean(ops.power(one, f32(2.0)), i64([-1]), True) for one in (x, y))
        return ops.multiply(y, ops.divide(ops.sqrt(of_x), ops.sqrt(ops.maximum(of_y, f32(_LEAST_MEAN_SQUARE)))))


_LEAST_MEAN_SQUARE = 1e-5
