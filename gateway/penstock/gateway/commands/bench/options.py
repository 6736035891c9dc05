"""The options of both `penstock bench` commands, besides the settings of a server."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.gateway.configuration.sections.language_model import EngineConfig, SimulatedOptions
from penstock.gateway.configuration.sections.types import Positive

SETTINGS = (
    *("model", "revision", "engine", "device", "max_model_len", "dtype", "weights", "activations", "weights_cache"),
    *("kv_cache_dtype", "threads", "cpus", "numa_nodes", "kv_cache_memory", "num_kv_blocks", "max_num_batched_tokens"),
    *(name for name in EngineConfig.__struct_fields__),
    *(name for name in SimulatedOptions.__struct_fields__ if name != "sim_faults"),
)
"""Those of a server that mean something without one."""
COMPARABLE = frozenset(SETTINGS) - {"model", "revision", "cpus", "numa_nodes"}
"""What `--compare` may change."""


class EngineBench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured, and how often."""

    prompt_lengths: Annotated[
        tuple[Positive, ...], Meta(min_length=1, description="tokens of the prompts that are computed alone")
    ] = (128, 1024)
    batch_sizes: Annotated[
        tuple[Positive, ...], Meta(min_length=1, description="requests that get their next tokens together")
    ] = (1, 4, 16, 64)
    context_lengths: Annotated[
        tuple[Positive, ...], Meta(min_length=1, description="tokens that each of these requests has at the beginning")
    ] = (128, 1024)
    decode_steps: Annotated[Positive, Meta(description="steps of one measurement, of which the mean is taken")] = 16
    repeats: Annotated[Positive, Meta(description="measurements of each figure, of which the median is taken")] = 3


class PerplexityBench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text, and how it is cut."""

    stdlib: Annotated[
        Literal["docstrings", "sources"],
        Meta(description="which part of Python's standard library is the text, without a file"),
    ] = "docstrings"
    text_tokens: Annotated[Positive, Meta(description="tokens used, from the beginning of the text")] = 8192
    context_length: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="most tokens of a window of the text; default: 512, or what the model's context allows"),
    ] = None
    stride: Annotated[
        Positive | None,
        Meta(
            description="tokens by which windows advance; only those that are new in it count; "
            "default: half of context-length"
        ),
    ] = None
    compare: Annotated[
        tuple[str, ...],
        Meta(
            description="other settings for the same model and text, as weights=int4 or weights=int8,activations=bf16; "
            "may be repeated; the KL divergence is from the distribution without them"
        ),
    ] = ()


LISTS = frozenset({"prompt_lengths", "batch_sizes", "context_lengths"})
"""Options that are written with commas."""
