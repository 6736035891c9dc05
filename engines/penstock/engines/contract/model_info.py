"""What is known of a loaded model."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway must know of a loaded model in order to validate requests."""

    vocab_size: int
    max_model_len: int
    """Prompt and output together, in tokens."""
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    runner: str
    """The runner's name and its settings, for logs and /version: "openvino bf16, kv u8, 2 threads"."""
    supports_logprobs: bool = True
    """False where tokens come from no distribution (the simulated runner)."""

    @property
    def context_length(self) -> int:
        """Prompt and output together that a request can have: a small KV cache shortens the model's own limit."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
