"""Which scheduler a model gets when that is left open, and what only vLLM's own can run.

The last file of this folder: engines are closed here, and with the first one vLLM ends what all of a process share.
"""

from __future__ import annotations

import gc
import logging

import pytest

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.messages import FinishReason
from penstock.engines.core import EngineCore
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.registry import EngineSpec, load_core
from support.engine import Driver
from support.models import load_reference, reference_tokens

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
BASE = {"dtype": "f32", "max_num_seqs": 4, "max_num_batched_tokens": 64}


def prompt(n, length=90):
    return [3 + (7 * n + 11 * i + i * i) % 250 for i in range(length)]


def load(folder, scheduling="auto", **options):
    spec = EngineSpec(runner="vllm", scheduling=scheduling, options=BASE | {"model_dir": str(folder)} | options)
    return load_core(spec, lambda: 0.0)


def num_models():
    gc.unfreeze()  # vLLM hides what it has loaded from the collector
    gc.collect()
    return sum(type(thing).__name__ == "Gemma3ForCausalLM" for thing in gc.get_objects())


def test_a_cache_that_ours_cannot_fill_is_for_vllms_scheduler(windows_dir, caplog, monkeypatch):
    """What a model's cache is like is known when it has been loaded: then it is loaded once more."""
    from penstock.engines.vllm import start
    from penstock.engines.vllm.engine_args import refuse

    monkeypatch.setattr(start, "check_cache", lambda cache: refuse("some of its KV cache is of another kind"))
    before = num_models()
    with caplog.at_level(logging.WARNING):
        core = load(windows_dir, num_blocks=60, engine_args={"disable_hybrid_kv_cache_manager": False})
    assert isinstance(core, AutonomousCore)
    assert "vllm schedules by itself" in caplog.text
    assert "some of its KV cache is of another kind" in caplog.text
    assert num_models() == before + 1
    batcher = core.batcher
    reference = load_reference(windows_dir)
    driver = Driver(batcher, max_num_seqs=4, max_num_batched_tokens=64)
    ids = {driver.add(prompt(n), 60)[0]: n for n in range(4)}
    driver.run()
    expected = {n: reference_tokens(reference, prompt(n), 60) for n in range(4)}
    assert len(set(expected[0])) > 10
    assert {n: driver.tokens[i] for i, n in ids.items()} == expected
    batcher.close()


def test_a_request_as_long_as_a_small_cache_allows(windows_dir):
    """What is said to fit must fit: vLLM would preempt a longer one for ever."""
    core = load(windows_dir, "engine", num_blocks=20)
    info = core.info
    assert 96 < info.context_length < 512
    driver = Driver(core.batcher, max_num_seqs=4, max_num_batched_tokens=64)
    [longest] = driver.add(prompt(1), info.context_length - 90)
    [too_long] = driver.add(prompt(2), info.context_length - 89)
    driver.run()
    assert driver.ends[longest].finish_reason is FinishReason.LENGTH
    assert len(driver.tokens[longest]) == info.context_length - 90
    assert driver.ends[too_long].error.code == "context_length_exceeded"
    assert core.batcher.num_free_blocks == info.num_blocks
    core.close()


def test_other_models_are_for_ours(model_dir):
    core = load(model_dir, num_blocks=24, engine_args={"block_size": 64, "disable_log_requests": True, "seed": 4})
    assert isinstance(core, EngineCore)
    assert (core.info.block_size, core.info.num_blocks) == (64, 24)
    core.close()


def test_what_was_told_is_not_overruled(windows_dir):
    with pytest.raises(UnsupportedError, match="--scheduler engine"):
        load(windows_dir, "penstock", num_blocks=60, engine_args={"speculative_config": {"method": "ngram"}})


def test_values_that_vllm_does_not_take(model_dir):
    with pytest.raises(InvalidRequestError, match=r"vLLM refuses this configuration: .*FLASH_NONSENSE"):
        load(model_dir, num_blocks=24, engine_args={"attention_backend": "FLASH_NONSENSE"})


def test_speculative_decoding_is_for_vllms_scheduler(model_dir, caplog):
    """The last test: its compiler's modules are more than the start-up of vLLM 0.32 can look through."""
    with caplog.at_level(logging.WARNING):
        core = load(model_dir, num_blocks=6, engine_args={"speculative_config": NGRAMS})
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
