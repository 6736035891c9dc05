"""Options that OpenAI's, vLLM's or SGLang's API knows and this server does not offer.

Ignoring one silently would give an answer to another question (unconstrained text where a schema was asked for), so
each is refused by name, except at a value that asks for nothing. Those that change nothing of the answer are hints:
requests have fields for them (`schemas`), and `note_hints` says that they are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from penstock.gateway.front.context import RequestContext
from penstock.gateway.openai.schemas import CommonRequest

_NOTHING = ("null",)
_OFF = ("null", "false")
_EMPTY = ("null", "[]", "{}")

_BOTH: dict[str, tuple[str, ...]] = {
    "ebnf": _NOTHING,
    "ec_transfer_params": _NOTHING,
    "grammar": _NOTHING,
    "guided_decoding": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "json_schema": _NOTHING,
    "kv_transfer_params": _NOTHING,
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
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
    "watermarking": _OFF,
}

CHAT: Mapping[str, tuple[str, ...]] = _BOTH | {
    "add_special_tokens": _OFF,
    "chat_template": _NOTHING,
    "modalities": ("null", '["text"]'),
    "separate_reasoning": ("null", "true"),
    "stream_reasoning": ("null", "true"),
    "suffix": _NOTHING,
}

COMPLETION: Mapping[str, tuple[str, ...]] = _BOTH | {
    "function_call": ("null", '"none"', '"auto"'),
    "functions": _EMPTY,
    "modalities": ("null", '["text"]'),
    "tool_choice": ("null", '"none"', '"auto"'),
    "tools": _EMPTY,
    "top_logprobs": ("null", "0"),
}
"""With fields of chats that would change the answer."""

_HINTS: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "guided_decoding_backend": (None,),
    "length_penalty": (None, 1),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "moderation": (None,),
    "stream_interval": (None, 1),
    "web_search_options": (None,),
}

_hints_of = attrgetter(*_HINTS)
_SILENT = (None,) * len(_HINTS)
"""Most requests: that is seen at once."""


def note_hints(request: CommonRequest, context: RequestContext) -> None:
    """Of those that are the same for every model. What a chat's `audio` would change, its `modalities` say."""
    if _hints_of(request) != _SILENT:
        for name, neutral in _HINTS.items():
            if getattr(request, name) not in neutral:
                context.ignore(name, "this server does nothing by it.")
    if request.stream_options is not None:
        if not request.stream:
            context.ignore("stream_options", "the answer is no stream.")
        elif request.stream_options.include_obfuscation:
            context.ignore("stream_options.include_obfuscation", "this server pads no chunks.")
