"""A model's count that is easy to multiply."""

from __future__ import annotations

from penstock.engines.contract.model_info import ModelWork

WORK = ModelWork(
    weight_bytes=1000,
    token_flops=300,
    logits_flops=70,
    kv_bytes=(8, 4),
    attention_flops=(6, 2),
    weights="bf16",
    activations="bf16",
    precision="bf16",
    threads=((0, 1), (5, 2)),
)
