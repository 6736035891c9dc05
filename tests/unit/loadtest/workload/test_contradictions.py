"""Settings that contradict each other, or would have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.loadtest import workload
from penstock.loadtest.errors import LoadTestError
from support.workload import DEMO, settings


@pytest.mark.parametrize(
    ("protocol", "values", "problem"),
    [
        ("openai-chat", {"trace_speed": 2}, "trace-speed: needs --trace"),
        ("openai-chat", {"trace_format": "azure"}, "trace-format: needs --trace"),
        ("openai-chat", {"trace_block": 16}, "trace-block: needs --trace"),
        ("openai-chat", {"trace": "t", "output_tokens": 1}, "output-tokens: a trace has its own requests"),
        ("openai-chat", {"trace": "t", "dataset": "d"}, "dataset: a trace has its own requests"),
        ("openai-chat", {"trace": "t", "mix": ["1 a"]}, "mix: a trace has its own requests"),
        ("openai-chat", {"trace": "t", "rate": 1}, "rate and ramp: a trace has its own times"),
        ("openai-chat", {"rate": 1, "concurrency": 4}, "concurrency: an open loop"),
        ("openai-chat", {"trace": "t", "concurrency": 4}, "concurrency: an open loop"),
        ("openai-chat", {"max_in_flight": 4}, "max-in-flight: needs --rate or --trace"),
        ("openai-chat", {"arrival": "constant"}, "arrival: needs --rate"),
        ("openai-chat", {"rate": 1, "burstiness": 2}, "burstiness: needs --arrival gamma"),
        ("openai-chat", {"dataset": "d", "prompt_tokens": 1}, "prompt-tokens: a dataset has its own prompts"),
        ("openai-chat", {"dataset": "d", "shared_prefix_tokens": 1}, "shared-prefix-tokens: a dataset"),
        ("openai-chat", {"prefixes": 2}, "prefixes: needs --shared-prefix-tokens"),
        ("openai-chat", {"turn_delay": 2}, "turn-delay: needs --turns"),
        ("openai-embeddings", {"turns": 2}, "turns: a session needs a protocol for chats, not openai-embeddings"),
        ("openai-chat", {"token_ids": True}, "token-ids: openai-chat takes no token ids"),
        ("openai-completions", {"token_ids": True}, "token-ids: needs --tokenizer"),
        (
            "openai-completions",
            {"token_ids": True, "tokenizer": str(DEMO), "dataset": "d"},
            "token-ids: a dataset has its own prompts",
        ),
        ("kserve-http", {"prompt_tokens": 9}, "prompt-tokens: kserve-http has tensors, not prompts"),
        ("kserve-grpc", {"dataset": "d"}, "dataset: kserve-grpc has tensors, not prompts"),
        ("kserve-grpc", {"tokenizer": "t"}, "tokenizer: kserve-grpc has tensors, not prompts"),
    ],
)
def test_settings_that_exclude_or_need_each_other_are_refused(
    protocol: str, values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(LoadTestError, match=problem):
        workload.build(settings(protocol, **values))
