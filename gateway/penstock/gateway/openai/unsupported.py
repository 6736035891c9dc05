"""Options that OpenAI's, vLLM's or SGLang's API knows and this server does not offer.

Ignoring one silently would give an answer to another question (unconstrained text where a schema was asked for), so
each is refused by name, except at a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

_NOTHING = ("null",)
_OFF = ("null", "false")
_EMPTY = ("null", "[]", "{}")

_BOTH: dict[str, tuple[str, ...]] = {
    "ebnf": _NOTHING,
    "ec_transfer_params": _NOTHING,
    "grammar": _NOTHING,
    "guided_decoding": _NOTHING,
    "guided_decoding_backend": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "json_schema": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "length_penalty": ("null", "1"),
    "logprob_token_ids": _EMPTY,
    "logprobs_mode": _NOTHING,
    "no_stop_trim": _OFF,
    "prompt_embeds": _NOTHING,
    "regex": _NOTHING,
    "repetition_detection": _NOTHING,
    "return_hidden_states": _OFF,
    "return_prompt_text": _OFF,
    "return_token_offsets": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "stop_regex": _NOTHING,
    "stream_interval": ("null", "1"),
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermarking": _OFF,
}

CHAT: Mapping[str, tuple[str, ...]] = _BOTH | {
    "add_special_tokens": _OFF,
    "audio": _NOTHING,
    "chat_template": _NOTHING,
    "function_call": ("null", '"none"'),
    "functions": _NOTHING,
    "media_io_kwargs": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "modalities": ("null", '["text"]'),
    "moderation": _NOTHING,
    "separate_reasoning": ("null", "true"),
    "stream_reasoning": ("null", "true"),
    "suffix": _NOTHING,
    "web_search_options": _NOTHING,
}

COMPLETION: Mapping[str, tuple[str, ...]] = _BOTH | {
    "audio": _NOTHING,
    "function_call": ("null", '"none"'),
    "functions": _EMPTY,
    "max_reasoning_tokens": _NOTHING,
    "modalities": ("null", '["text"]'),
    "prediction": _NOTHING,
    "reasoning_effort": _NOTHING,
    "thinking_token_budget": _NOTHING,
    "tool_choice": ("null", '"none"', '"auto"'),
    "tools": _EMPTY,
    "top_logprobs": ("null", "0"),
    "web_search_options": _NOTHING,
}
"""With fields of chats that would change the answer."""
