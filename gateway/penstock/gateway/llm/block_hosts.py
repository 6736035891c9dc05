"""Engines of which the contents of KV cache blocks can be read and written from outside (`BlockHost`)."""

from __future__ import annotations

from penstock.engines.vllm.contract import is_cpu_build

BLOCK_HOSTS = "the openvino engine, and vllm on CPUs,"


def is_block_host(engine: str) -> bool:
    """As far as it is known before the engine is started."""
    return engine in ("openvino", "simulated") or (engine == "vllm" and is_cpu_build())
