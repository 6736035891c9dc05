"""What the model's own limits make of the runner's settings."""

from __future__ import annotations

from penstock.engines.errors import ContextLengthError
from penstock.engines.openvino.config import OpenVINOConfig


def max_model_len(config: OpenVINOConfig, limit: int) -> int:
    """`limit` is what the model was made for; raises ContextLengthError when more is asked for."""
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ContextLengthError(
            f"max_model_len={config.max_model_len} is above the model's {limit}", param="max_model_len"
        )
    return config.max_model_len
