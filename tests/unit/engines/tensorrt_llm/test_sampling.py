"""Our sampling parameters in TensorRT-LLM's words, and what its samplers would ignore."""

from __future__ import annotations

import pytest

from penstock.engines.contract.continuous_batcher import StartRequest
from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import UnsupportedError
from penstock.engines.tensorrt_llm.sampling import TRTLLM_SAMPLER, sampling_arguments, stop_tokens

EOS = (2, 9)


def arguments(sampler="auto", seed=None, eos=EOS, **params):
    request = StartRequest(1, [5], SamplingParams(**{"max_tokens": 4} | params), seed)
    return sampling_arguments(request, stop_tokens(request.params, eos), sampler)


def test_a_plain_request():
    assert arguments(temperature=0.7, top_p=0.9, top_k=40) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "end_id": 2,
        "pad_id": 2,
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "max_tokens": 4,
        "detokenize": False,
    }


def test_greedy_is_the_likeliest_of_one():
    found = arguments(temperature=0.0, top_p=0.5, seed=3)
    assert found["top_k"] == 1
    assert not {"temperature", "top_p", "seed"} & found.keys()


def test_what_ends_a_request():
    assert arguments(stop_token_ids=(7, 2))["stop_token_ids"] == [9, 7]
    ignoring = arguments(stop_token_ids=(7, 8), ignore_eos=True)
    assert (ignoring["end_id"], ignoring["stop_token_ids"]) == (7, [8])
    nothing = arguments(ignore_eos=True)
    assert (nothing["end_id"], nothing["pad_id"], nothing["stop_token_ids"]) == (-1, 0, None)


@pytest.mark.parametrize(("asked", "given"), [(None, None), (0, 1), (1, 1), (5, 5)])
def test_at_least_one_logprob_is_asked_for_where_any_is_wanted(asked, given):
    assert arguments(logprobs=asked).get("logprobs") == given


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 2},
        {"seed": 5},
    ],
)
def test_what_the_default_sampler_would_ignore_is_refused(params):
    name = next(iter(params))
    with pytest.raises(UnsupportedError, match=rf"{name}=.*sampler_type.*TRTLLMSampler") as caught:
        arguments(**params)
    assert caught.value.param == name


def test_the_other_sampler_takes_it():
    found = arguments(
        TRTLLM_SAMPLER,
        seed=(1 << 64) + 5,
        eos=(2,),
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        min_tokens=3,
    )
    assert found["seed"] == 5
    assert found["min_p"] == 0.1
    assert found["min_tokens"] == 3
    assert (found["presence_penalty"], found["frequency_penalty"], found["repetition_penalty"]) == (0.5, 0.25, 1.1)


def test_a_minimum_holds_back_one_end_only():
    assert "min_tokens" not in arguments(TRTLLM_SAMPLER, ignore_eos=True, min_tokens=3)
    with pytest.raises(UnsupportedError, match=r"min_tokens=3.*2 tokens that end it"):
        arguments(TRTLLM_SAMPLER, min_tokens=3)


@pytest.mark.parametrize("sampler", ["auto", TRTLLM_SAMPLER])
def test_prompt_logprobs_are_refused(sampler):
    with pytest.raises(UnsupportedError, match="prompt_logprobs=0 is not supported"):
        arguments(sampler, prompt_logprobs=0)


def test_a_seed_means_nothing_to_a_greedy_request():
    assert arguments(temperature=0, seed=5)["top_k"] == 1
