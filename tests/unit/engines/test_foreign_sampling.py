"""Adapters of foreign engines: each field of our sampling parameters reaches the engine, or is refused by its name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.engines.contract.continuous_batcher import StartRequest
from penstock.engines.contract.messages import Grammar, ProcessorCall, SamplingParams
from penstock.engines.errors import UnsupportedError
from penstock.engines.tensorrt_llm.sampling import TRTLLM_SAMPLER, bias, guide, sampling_arguments, stop_tokens

EXAMPLES: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {2: 1.0},
    "allowed_token_ids": (1, 2),
    "bad_words": ((1, 2),),
    "processors": (ProcessorCall("shout", {}),),
    "stop_token_ids": (6,),
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "prediction": (1, 2, 3),
    "grammar": Grammar("regex", "[ab]+"),
}
EOS = (5,)
Adapter = Callable[[SamplingParams], Any]


def to_tensorrt_llm(params: SamplingParams, sampler: str) -> Any:
    request = StartRequest(1, [5], params, params.seed)
    arguments = sampling_arguments(request, stop_tokens(params, EOS), sampler)
    grammar = None if params.grammar is None else guide(params.grammar, "xgrammar")
    change = bias(params.logit_bias, 16)
    return arguments, None if change is None else change.tolist(), grammar


@pytest.fixture
def to_vllm(monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """Over stand-ins of vLLM's classes that keep what they get."""
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    classes = {"SamplingParams": SimpleNamespace, "StructuredOutputsParams": SimpleNamespace}
    vars(sys.modules["vllm.sampling_params"]).update(classes)
    worker = ModuleType("penstock.engines.vllm.worker")
    vars(worker)["RANDOM_KEY"] = "key"
    monkeypatch.setitem(sys.modules, worker.__name__, worker)
    monkeypatch.delitem(sys.modules, "penstock.engines.vllm.sampling", raising=False)
    sampling = importlib.import_module("penstock.engines.vllm.sampling")
    monkeypatch.delitem(sys.modules, sampling.__name__)

    def adapt(params: SamplingParams) -> Any:
        theirs = sampling.to_vllm(params, EOS, params.seed, params.prompt_logprobs is not None, True)
        if params.grammar is not None:
            theirs.structured_outputs = sampling.to_structured_outputs(params.grammar, "xgrammar")
        return theirs

    return adapt


@pytest.fixture(params=["vllm", "auto", TRTLLM_SAMPLER])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    if request.param == "vllm":
        adapter: Adapter = request.getfixturevalue("to_vllm")
        return adapter
    return partial(to_tensorrt_llm, sampler=request.param)


def outcome(adapter: Adapter, params: SamplingParams) -> Any:
    """What the engine gets, or the field that was refused."""
    try:
        return adapter(params)
    except UnsupportedError as refusal:
        return refusal.param


def test_there_is_an_example_of_each_field() -> None:
    """A new field needs one here, and with it the decision what the adapters do about it."""
    assert set(EXAMPLES) == {field.name for field in msgspec.structs.fields(SamplingParams)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_field_is_ignored(adapter: Adapter, name: str) -> None:
    plain = SamplingParams(max_tokens=4)
    result = outcome(adapter, msgspec.structs.replace(plain, **{name: EXAMPLES[name]}))
    assert result == name if isinstance(result, str) else result not in (adapter(plain), None)


def test_what_vllm_is_not_handed_is_refused(to_vllm: Adapter) -> None:
    for name in ("processors", "prediction"):
        with pytest.raises(UnsupportedError, match=f"^{name} is not supported by this model's engine"):
            to_vllm(SamplingParams(max_tokens=4, **{name: EXAMPLES[name]}))
