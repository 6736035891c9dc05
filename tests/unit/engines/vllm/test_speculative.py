"""Speculative decoding, by vLLM's own scheduler.

The last file of this folder: with the compiler that it imports in the process, vLLM's start-up trips over (0.32).
"""

from __future__ import annotations

import logging

from helpers_engine import Driver
from helpers_models import load_reference, reference_tokens
from penstock.engines.messages import FinishReason
from penstock.engines.registry import EngineSpec, load_core

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_speculative_decoding_makes_it_vllms_scheduler(model_dir, caplog):
    options = {"model_dir": str(model_dir), "dtype": "f32", "num_blocks": 6, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 64, "engine_args": {"speculative_config": NGRAMS}}
    with caplog.at_level(logging.WARNING):
        core = load_core(EngineSpec(runner="vllm", options=options), lambda: 0.0)
    assert "speculative_config (engine_args) is for vLLM's own scheduler" in caplog.text
    driver = Driver(core.batcher, max_num_seqs=4, max_num_batched_tokens=64)
    plain, looped = [3 + 7 * i % 250 for i in range(50)], [5, 6, 7, 8] * 12
    [first], [second] = driver.add(plain, 50), driver.add(looped, 50)
    [refused] = driver.add(looped, 50, temperature=1.0, min_p=0.2)
    several = 0
    while len(driver.ends) < 3:
        several += sum(len(output.token_ids) > 1 for output in driver.step())
    reference = load_reference(model_dir)
    assert driver.tokens[first] == reference_tokens(reference, plain, 50)
    assert driver.tokens[second] == reference_tokens(reference, looped, 50)
    assert several > 0  # a guess was right
    assert "speculative decoding" in driver.ends[refused].error.message
    # drafts need room behind the last token, so the longest request is shorter than the cache
    room = core.info.context_length
    assert room == 6 * 32 - 3
    [longest] = driver.add(plain, room - 50)
    driver.run()
    assert driver.ends[longest].finish_reason is FinishReason.LENGTH
    assert len(driver.tokens[longest]) == room - 50
    core.close()
