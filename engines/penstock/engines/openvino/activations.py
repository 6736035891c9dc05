"""Activations of MLPs, by the names that config.json has for them."""

from __future__ import annotations

from collections.abc import Callable

import openvino.opset15 as ops

from penstock.engines.openvino.decoder_spec import Activation
from penstock.engines.openvino.weights import Node


def _gelu_tanh(x: Node) -> Node:
    return ops.gelu(x, "tanh")


ACTIVATIONS: dict[Activation, Callable[[Node], Node]] = {
    "silu": ops.swish,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu": lambda x: ops.gelu(x, "erf"),
    "relu": ops.relu,
}
