"""Sums over a model's own count."""

from __future__ import annotations

from penstock.gateway.commands.bench.engine_bench import decode_bytes, decode_flops, prompt_flops, threads_for
from penstock.kvcache import KVGroup
from unit.gateway.commands.bench.known_work import WORK

GROUPS = (KVGroup(16), KVGroup(16, window=3))


def test_a_step_reads_the_weights_once_and_the_past_of_each_request() -> None:
    assert decode_bytes(WORK, GROUPS, batch=1, context=2) == 1000 + 2 * 8 + 2 * 4
    assert decode_bytes(WORK, GROUPS, batch=4, context=10) == 1000 + 4 * (10 * 8 + 3 * 4)


def test_a_step_computes_each_request() -> None:
    assert decode_flops(WORK, GROUPS, batch=4, context=10) == 4 * (300 + 70 + 10 * 6 + 3 * 2)


def test_a_prompt_has_logits_for_its_last_token_only() -> None:
    assert prompt_flops(WORK, GROUPS, 4) == 4 * 300 + 70 + (1 + 2 + 3 + 4) * 6 + (1 + 2 + 3 + 3) * 2


def test_threads_by_the_size_of_a_step() -> None:
    assert [threads_for(WORK, tokens) for tokens in (1, 4, 5, 500)] == [1, 1, 2, 2]
