"""Chat templates as model families have them, cut down to what differs between them, and tokenizers for them."""

from __future__ import annotations

import tokenizers

from support.tokenizers import build

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|header|>", "<|end_header|>", "[INST]", "[/INST]")
NOT_SPECIAL = (
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "\n\n\n",
    "<h1>",
)
"""Added, and not special. The last two are none that a template writes."""

CHATML = """
{%- for tool in tools or [] %}{{- '<|im_start|>system\\n' ~ (tool | tojson) ~ '<|im_end|>\\n' }}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif m.content.startswith('<tool_response>') %}
        {{- raise_exception('a tool spoke as the user') }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA = """{{- bos_token }}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- for m in messages %}
    {{- '<|header|>' + m['role'] + '<|end_header|>\\n\\n' + m['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
    {%- elif m.content is string %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- else %}{{- '[INST] ' }}{%- for part in m.content %}{{- part.text }}{%- endfor %}{{- ' [/INST]' }}{%- endif %}
{%- endfor %}
"""

DEEPSEEK = """{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<｜Assistant｜>' + content + eos_token }}
    {%- else %}{{- m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
"""

BUILT_TAGS = """
{%- for tool in tools or [] %}{%- for key in tool.function.parameters.properties %}
    {{- '<' ~ key ~ '>' ~ (tool.function.description | tojson(ensure_ascii=true)) }}
{%- endfor %}{%- endfor %}
{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|eot|>' }}{%- endfor %}
"""
"""As of Phi and Qwen3-Coder: tags are put together out of a role or a name."""

TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "built_tags": BUILT_TAGS,
}
ROLE_TAGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def chat_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """With all tokens that the templates write, and a few that they do not."""
    backend = build(kind)
    backend.add_special_tokens([*SPECIAL, *ROLE_TAGS])
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in NOT_SPECIAL])
    return backend
