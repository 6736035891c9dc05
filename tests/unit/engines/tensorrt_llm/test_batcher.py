"""The engine over a stand-in of TensorRT-LLM: what comes out, and what it counts."""

from __future__ import annotations

import threading

import pytest

from penstock.engines.contract.messages import FinishReason
from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from support.tensorrt_llm import BLOCK, VOCAB_SIZE, greedy

PROMPT = list(range(10, 50))


def test_what_is_known_of_the_model(engine):
    info = engine.batcher.info
    assert (info.vocab_size, info.max_model_len, info.block_size, info.num_blocks) == (VOCAB_SIZE, 512, BLOCK, 24)
    assert info.eos_token_ids == (2,)
    assert info.runner == "tensorrt_llm 1.2.1, cuda x1, bf16, kv auto, own scheduler"
    assert info.supports_logprobs
    assert engine.batcher.num_free_blocks == 24


def test_arguments_of_the_llm(make):
    args = make(max_num_batched_tokens=4, tensor_parallel_size=2, kv_cache_dtype="fp8", prefix_caching=False).llm.args
    assert args.backend == "pytorch"
    assert args.skip_tokenizer_init
    assert args.enable_iter_perf_stats
    assert args.enable_chunked_prefill
    assert (args.max_batch_size, args.max_num_tokens, args.max_seq_len, args.tensor_parallel_size) == (8, 8, 512, 2)
    cache = args.kv_cache_config
    assert (cache.free_gpu_memory_fraction, cache.max_tokens, cache.dtype) == (0.9, 24 * BLOCK, "fp8")
    assert not cache.enable_block_reuse
    assert args.lora_config is None


def test_greedy_tokens_of_many_at_once(engine):
    asked = {engine.start([*PROMPT, n], 10 + n): ([*PROMPT, n], 10 + n) for n in range(8)}
    engine.finish(*asked)
    for request, (prompt, count) in asked.items():
        assert engine.tokens[request] == greedy(prompt, count)
        assert engine.ends[request].finish_reason is FinishReason.LENGTH


def test_end_of_sequence_and_stop_tokens(engine):
    tokens = greedy(PROMPT, 20)
    stop = tokens[5]
    named = engine.start(PROMPT, 20, stop_token_ids=(stop,), ignore_eos=False)
    engine.finish(named)
    assert engine.tokens[named] == tokens[: tokens.index(stop) + 1]
    assert engine.ends[named].finish_reason is FinishReason.STOP
    assert engine.ends[named].stop_token_id == stop


def test_an_eos_is_not_told_as_a_stop_token(engine):
    eos = engine.start(PROMPT, 5, stop_token_ids=(2,), ignore_eos=False, logit_bias={2: 100.0})
    engine.finish(eos)
    assert engine.tokens[eos] == [2]
    assert engine.ends[eos].stop_token_id is None


def test_a_bias_decides(engine):
    request = engine.start(PROMPT, 3, logit_bias={77: 100.0})
    engine.finish(request)
    assert engine.tokens[request] == [77, 77, 77]
    with pytest.raises(InvalidRequestError, match="384 is not a token"):
        engine.start(PROMPT, logit_bias={VOCAB_SIZE: 1.0})


@pytest.mark.parametrize("top", [0, 1, 3])
def test_every_token_has_its_logprob_and_as_many_others_as_asked_for(engine, top):
    request = engine.start(PROMPT, 6, logprobs=top)
    engine.finish(request)
    entries = [entry for new in engine.news for entry in new.logprobs]
    assert [entry.token_id for entry in entries] == greedy(PROMPT, 6)
    assert all(entry.rank == 1 and entry.logprob == -0.5 and len(entry.top) == top for entry in entries)
    if top:
        assert entries[0].top[0] == (entries[0].token_id, -0.5)


def test_a_token_without_its_logprob_fails_its_request(make):
    engine = make({"no_logprob": True})
    request = engine.start(PROMPT, 1000, logprobs=2)
    other = engine.start(PROMPT, 4)
    engine.finish(request, other)
    assert "no logprob" in engine.ends[request].error.message
    assert engine.tokens[other] == greedy(PROMPT, 4)
    engine.wait(lambda: request in engine.released)
    assert engine.llm.num_active == 0


def test_cached_prompt_tokens_are_told_once_with_the_first_tokens(engine):
    for _ in range(2):
        engine.finish(engine.start(PROMPT, 3))
    salted = engine.start(PROMPT, 3, cache_salt="tenant")
    engine.finish(salted)
    cached = {request: sum(new.num_cached_tokens for new in engine.news if new.id == request) for request in (1, 2, 3)}
    assert cached == {1: 0, 2: BLOCK, 3: 0}


def test_a_request_that_fails_leaves_its_neighbours_alone(make):
    engine = make({"poison": 99})
    bad, good = engine.start([99, 5]), engine.start(PROMPT)
    engine.finish(bad, good)
    assert isinstance(engine.ends[bad].error, EngineError)
    assert engine.ends[bad].error.message == "The engine failed on this request."
    assert engine.tokens[good] == greedy(PROMPT, 8)


def test_a_request_that_is_refused_at_once(engine):
    request = engine.start([VOCAB_SIZE])
    engine.finish(request)
    assert isinstance(engine.ends[request].error, InvalidRequestError)
    assert "out of range" in engine.ends[request].error.message
    assert not engine.batcher.watchdog.is_busy


def test_an_abort_ends_with_released_and_nothing_else(engine):
    request, other = engine.start(PROMPT, 400), engine.start(PROMPT, 6)
    engine.wait(lambda: engine.tokens[request])
    engine.batcher.abort([request, 12345])
    engine.wait(lambda: engine.released)
    engine.finish(other)
    assert engine.released == [request]
    assert request not in engine.ends
    assert engine.tokens[other] == greedy(PROMPT, 6)


def test_an_abort_right_behind_its_request(engine):
    request = engine.start(PROMPT, 400)
    engine.batcher.abort([request])
    engine.wait(lambda: engine.released == [request])
    assert engine.llm.num_active == 0


def test_free_blocks_follow_the_statistics(engine):
    request = engine.start(PROMPT * 3, 300)
    engine.wait(lambda: engine.batcher.num_free_blocks < 24 - 4)
    engine.batcher.abort([request])
    engine.wait(lambda: engine.released)
    assert engine.batcher.num_free_blocks == 24


def test_a_dead_engine_gets_out_of_step_after_what_came_before(engine):
    request = engine.start(PROMPT, 400)
    engine.wait(lambda: engine.tokens[request])
    engine.llm.die(RuntimeError("a worker is gone"))
    with pytest.raises(EngineError, match="TensorRT-LLM failed: a worker is gone"):
        engine.wait(lambda: False)
    with pytest.raises(EngineError, match="a worker is gone"):
        engine.batcher.step()


def test_an_engine_that_is_shut_down_takes_nothing(engine):
    engine.llm.shutdown()
    engine.start(PROMPT)
    with pytest.raises(EngineError, match="LLM is shutting down"):
        engine.wait(lambda: False)


@pytest.mark.parametrize("stats", [{"numActiveRequests": 1}, {"kvCacheStats": {"maxNumBlocks": 3}}])
def test_statistics_that_have_moved_are_named_at_the_start(make, stats):
    with pytest.raises(EngineError, match=r"no .*tokensPerBlock"):
        make({"stats": stats})


def test_no_logprobs_with_the_other_sampler(make):
    engine = make(engine_args={"sampler_type": "TRTLLMSampler"})
    assert not engine.batcher.info.supports_logprobs
    with pytest.raises(UnsupportedError, match="logprobs=1 is not supported"):
        engine.start(PROMPT, logprobs=1)


def test_an_end_that_the_other_sampler_does_not_tell_is_told(make):
    engine = make(engine_args={"sampler_type": "TRTLLMSampler"})
    tokens = greedy(PROMPT, 20)
    named = engine.start(PROMPT, 20, stop_token_ids=(tokens[5],))
    at_once = engine.start(PROMPT, 20, ignore_eos=False, logit_bias={2: 100.0})
    engine.finish(named, at_once)
    assert engine.tokens[named] == tokens[: tokens.index(tokens[5]) + 1]
    assert engine.ends[named].stop_token_id == tokens[5]
    assert engine.tokens[at_once] == [2]
    assert engine.ends[at_once].stop_token_id is None


def test_processes_that_do_not_end_are_not_waited_for(make, caplog):
    engine = make(farewell=0.01)
    engine.llm.shutdown, shut_down = threading.Event().wait, engine.llm.shutdown
    engine.batcher.close()
    assert "does not end its processes" in caplog.text
    shut_down()


def test_blocks_of_prompts_count_before_statistics_tell_of_them(engine):
    engine.llm.faults.mute = True
    request = engine.start(PROMPT * 3, 300)
    engine.wait(lambda: engine.tokens[request])
    assert engine.batcher.num_free_blocks == 24 - 4
