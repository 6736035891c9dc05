"""A small decoder in OpenVINO IR with keys and values as its state, as Optimum exports them, and what OpenVINO itself
says with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from support.models import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer

HIDDEN, HEADS, DIM, LAYERS = 64, 4, 16, 2


def write_exported(
    folder: Path, *, weights: str = "f32", positions: str = "as they are", recurrent: bool = False, **settings: Any
) -> Path:
    """`weights`: f32, int8 or int4, the latter two behind a conversion and a scale. `positions`: "as they are", or
    counted from the length of the state, "counted" once or "in threes", as Optimum does for Qwen3.5. `recurrent`: a
    short convolution is in front of attention. `settings` go to config.json. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    ov.save_model(_Graph(weights, positions, recurrent).model(), folder / "openvino_model.xml", compress_to_fp16=False)
    config = {
        "architectures": ["ExoticForCausalLM"],
        "model_type": "exotic",
        "max_position_embeddings": 256,
        "eos_token_id": EOS_TOKEN_ID,
        "vocab_size": VOCAB_SIZE,
    }
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    make_tokenizer().save_pretrained(folder)
    return folder


def exported_tokens(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy ones, by the graph as it is."""
    compiled = ov.Core().compile_model(
        folder / "openvino_model.xml",
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
            "INFERENCE_NUM_THREADS": "1",
        },
    )
    request, tokens, found = compiled.create_infer_request(), list(prompt), []
    for past in range(len(prompt), len(prompt) + count):
        logits = request.infer(
            {
                "input_ids": np.array([tokens]),
                "attention_mask": np.ones((1, past), np.int64),
                "position_ids": np.arange(past - len(tokens), past)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )[0]
        tokens = [int(logits[0, -1].argmax())]
        found += tokens
    return found


class _Graph:
    def __init__(self, weights: str, positions: str, recurrent: bool) -> None:
        self._weights = weights
        self._positions = positions
        self._recurrent = recurrent
        self._random = np.random.default_rng(0)
        self._sinks: list[Any] = []
        self._pasts: dict[str, Any] = {}
        names = {"input_ids": 2, "attention_mask": 2, "position_ids": 2, "beam_idx": 1}
        self._inputs = {}
        for name, axes in names.items():
            node = ops.parameter([-1] * axes, np.int32 if name == "beam_idx" else np.int64, name=name)
            node.output(0).set_names({name})
            self._inputs[name] = node

    def model(self) -> ov.Model:
        table = self._random.standard_normal((VOCAB_SIZE, HIDDEN)).astype(np.float32)
        x = ops.gather(ops.constant(table), self._inputs["input_ids"], _i64(0))
        positions = ops.unsqueeze(ops.convert(self._places(), "f32"), _i64([1, 3]))  # [B, 1, S, 1]
        total = ops.gather(ops.shape_of(self._inputs["attention_mask"]), _i64(1), _i64(0))
        keys = ops.convert(ops.range(_i64(0), total, _i64(1), "i64"), "f32")
        mask = ops.select(ops.less_equal(keys, positions), _f32(0.0), _f32(-np.inf))
        if self._recurrent:
            x = ops.add(x, self._convolution(x))
        for layer in range(LAYERS):
            x = ops.add(x, self._attention(self._norm(x), positions, mask, layer))
            inner = self._linear(self._norm(x), 2 * HIDDEN)
            x = ops.add(x, self._linear(ops.multiply(inner, ops.sigmoid(inner)), HIDDEN))
        logits = self._linear(self._norm(x), VOCAB_SIZE)
        logits.output(0).set_names({"logits"})
        return ov.Model([ops.result(logits)], self._sinks, list(self._inputs.values()), "exported")

    def _places(self) -> Any:
        """[B, S]"""
        if self._positions == "as they are":
            return self._inputs["position_ids"]
        past = ops.gather(ops.shape_of(self._past("past_key_values.0.key")), _i64(2), _i64(0))
        batch, length = (ops.gather(ops.shape_of(self._inputs["input_ids"]), _i64([n]), _i64(0)) for n in (0, 1))
        new = ops.squeeze(length, _i64([0]))
        counted = ops.range(past, ops.add(past, new), _i64(1), "i64")
        if self._positions == "counted":
            return ops.broadcast(counted, ops.concat([batch, length], 0))
        threes = ops.broadcast(ops.unsqueeze(counted, _i64([0, 1])), ops.concat([_i64([3]), batch, length], 0))
        return ops.gather(threes, _i64(0), _i64(0))

    def _convolution(self, x: Any) -> Any:
        size = 3
        batch, length = (ops.gather(ops.shape_of(self._inputs["input_ids"]), _i64([n]), _i64(0)) for n in (0, 1))
        zeros = ops.broadcast(_f32(0.0), ops.concat([batch, _i64([HIDDEN, size])], 0))
        known = ov.PartialShape([-1, HIDDEN, size])
        past = ops.gather(ops.read_value(zeros, "conv.0", ov.Type.f32, known), self._inputs["beam_idx"], _i64(0))
        whole = ops.concat([past, ops.transpose(x, _i64([0, 2, 1]))], -1)
        end = _i64([np.iinfo(np.int64).max])
        self._sinks.append(ops.assign(ops.slice(whole, _i64([-size]), end, _i64([1]), _i64([2])), "conv.0"))
        kernel = self._random.standard_normal((HIDDEN, 1, 1, size)).astype(np.float32)
        y = ops.group_convolution(whole, _f32(kernel), [1], [0], [0], [1])
        y = ops.slice(y, ops.multiply(length, _i64([-1])), end, _i64([1]), _i64([2]))
        return ops.transpose(y, _i64([0, 2, 1]))

    def _attention(self, x: Any, positions: Any, mask: Any, layer: int) -> Any:
        q, k, v = (
            ops.transpose(ops.reshape(self._linear(x, HIDDEN), _i64([0, 0, HEADS, DIM]), True), _i64([0, 2, 1, 3]))
            for _ in range(3)
        )
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        k, v = (self._with_past(new, f"past_key_values.{layer}.{kind}") for new, kind in ((k, "key"), (v, "value")))
        y = ops.scaled_dot_product_attention(q, k, v, mask, _f32(DIM**-0.5))
        return self._linear(ops.reshape(ops.transpose(y, _i64([0, 2, 1, 3])), _i64([0, 0, HIDDEN]), True), HIDDEN)

    def _with_past(self, new: Any, name: str) -> Any:
        whole = ops.concat([self._past(name), new], 2)
        self._sinks.append(ops.assign(whole, name))
        return whole

    def _past(self, name: str) -> Any:
        if name not in self._pasts:
            batch = ops.gather(ops.shape_of(self._inputs["input_ids"]), _i64([0]), _i64(0))
            empty = ops.broadcast(_f32(0.0), ops.concat([batch, _i64([HEADS, 0, DIM])], 0))
            past = ops.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, HEADS, -1, DIM]))
            self._pasts[name] = ops.gather(past, self._inputs["beam_idx"], _i64(0))
        return self._pasts[name]

    def _rotated(self, x: Any, positions: Any) -> Any:
        angles = ops.multiply(positions, _f32(10000.0 ** -(np.arange(DIM // 2) / (DIM // 2))))
        cos, sin = (ops.concat([turn(angles)] * 2, -1) for turn in (ops.cos, ops.sin))
        first, second = ops.split(x, _i64(3), 2).outputs()
        turned = ops.concat([ops.multiply(second, _f32(-1.0)), first], -1)
        return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))

    def _norm(self, x: Any) -> Any:
        return ops.mvn(x, _i64([-1]), True, 1e-5, "inside_sqrt")

    def _linear(self, x: Any, out: int) -> Any:
        inner = x.output(0).partial_shape[2].get_length()
        matrix = self._random.standard_normal((out, inner)).astype(np.float32) * np.float32(1.5 / inner**0.5)
        if self._weights == "f32":
            return ops.matmul(x, ops.constant(matrix), False, True)
        top = 127 if self._weights == "int8" else 7
        scale = np.abs(matrix).max(1, keepdims=True) / top
        kind = ov.Type.i8 if self._weights == "int8" else ov.Type.i4
        values = ops.convert(ops.constant(np.rint(matrix / scale).astype(np.int8), dtype=kind), "f32")
        return ops.matmul(x, ops.multiply(values, ops.constant(scale)), False, True)


def _i64(value: object) -> Any:
    return ops.constant(np.asarray(value, np.int64))


def _f32(value: object) -> Any:
    return ops.constant(np.asarray(value, np.float32))
