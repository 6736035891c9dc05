"""Fields of the Responses API that ask for what this server does not do, each with the values that ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.openai.unsupported import CHAT

_NOTHING = ("null",)

UNSUPPORTED: Mapping[str, tuple[str, ...]] = dict(CHAT) | {
    "access_programs": _NOTHING,
    "audio": _NOTHING,
    "background_options": _NOTHING,
    "best_of": ("null", "1"),
    "echo": ("null", "false"),
    "function_call": ("null", '"none"'),
    "functions": _NOTHING,
    "image": _NOTHING,
    "logprobs": ("null", "false"),
    "max_completion_tokens": _NOTHING,
    "max_tokens": _NOTHING,
    "messages": _NOTHING,
    "moderation": _NOTHING,
    "n": ("null", "1"),
    "prediction": _NOTHING,
    "prompt": _NOTHING,
    "prompt_logprobs": _NOTHING,
    "reasoning_effort": _NOTHING,
    "response_format": _NOTHING,
    "stream_options": ("null", "{}", '{"include_obfuscation":false}'),
    "truncate_prompt_tokens": _NOTHING,
    "web_search_options": _NOTHING,
}
