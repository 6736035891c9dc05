"""The engine uses what the contract names, and the stand-in offers that and nothing else."""

from __future__ import annotations

import inspect

import pytest

import support.tensorrt_llm as stand_in
from penstock.engines.errors import EngineError
from penstock.engines.kit.package_contract import field_names
from penstock.engines.tensorrt_llm.contract import CONTRACT, KV_CACHE_CONFIG, LLM_ARGS

TO_CONTROL_IT = {
    ("LLM", name) for name in ("abort", "args", "aborts", "die", "faults", "is_shut_down", "num_active")
} | {("LLM", "num_blocks")}
"""What tests use of the stand-in, and the engine does not."""


@pytest.mark.usefixtures("package")
def test_the_stand_in_keeps_the_contract():
    assert list(CONTRACT.differences()) == []


def pinned(path: str) -> set[str]:
    """Parameters and fields that the contract names at a path."""
    return {*CONTRACT.calls.get(path, ()), *CONTRACT.fields.get(path, ()), *CONTRACT.attributes.get(path, ())}


def paths() -> set[str]:
    return {*CONTRACT.calls, *CONTRACT.fields, *CONTRACT.attributes, *CONTRACT.present}


def test_the_stand_in_offers_nothing_that_is_not_in_the_contract():
    known = paths()
    extra = []
    for module, contents in stand_in.CONTENTS.items():
        for thing in contents:
            path = f"{module}:{thing.__name__}"
            if path in CONTRACT.fields:
                extra += [f"{path} {name}" for name in field_names(thing) - pinned(path)]
                continue
            for name, value in vars(thing).items():
                if name.startswith("_") or (thing.__name__, name) in TO_CONTROL_IT:
                    continue
                if f"{path}.{name}" not in known:
                    extra.append(f"{path}.{name}")
                elif inspect.isfunction(value) and f"{path}.{name}" in CONTRACT.calls:
                    there = set(inspect.signature(value).parameters)
                    extra += [f"{path}.{name}({p})" for p in there - pinned(f"{path}.{name}")]
    assert extra == []


def test_the_arguments_of_the_llm_are_in_the_contract(tmp_path):
    from penstock.engines.tensorrt_llm.arguments import llm_arguments
    from penstock.engines.tensorrt_llm.config import CheckpointFacts, TensorRTLLMConfig

    checkpoint = CheckpointFacts(384, 512, (2,), "bf16", "")
    config = TensorRTLLMConfig(model_dir=tmp_path, num_blocks=3, max_loras=1, kv_cache_dtype="fp8")
    arguments = llm_arguments(config, checkpoint)
    assert set(arguments) <= pinned(LLM_ARGS)
    assert set(arguments["kv_cache_config"]) <= pinned(KV_CACHE_CONFIG)
    assert set(arguments["lora_config"]) <= pinned("tensorrt_llm.lora_helper:LoraConfig")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("owner", "name", "there", "said"),
    [
        (stand_in.LLM, "generate_async", lambda self, prompt: None, "generate_async has no parameter 'inputs'"),
        (stand_in.RequestOutput, "abort", None, "RequestOutput.abort is gone"),
        (stand_in.GenerationResultBase, "__init__", lambda self: None, "has no attribute 'cached_tokens'"),
    ],
)
def test_what_has_moved_is_named(monkeypatch, owner, name, there, said):
    if there is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, there)
    with pytest.raises(EngineError, match=r"TensorRT-LLM 1\.2\.9 is not what this engine was made for") as caught:
        CONTRACT.check("TensorRT-LLM", "1.2.9")
    assert said in str(caught.value)


@pytest.mark.usefixtures("package")
def test_a_field_that_is_gone_is_named(monkeypatch):
    import tensorrt_llm

    class SamplingParams(stand_in.BaseModel):
        end_id: int

    monkeypatch.setattr(tensorrt_llm, "SamplingParams", SamplingParams)
    assert "tensorrt_llm:SamplingParams has no field 'top_k'" in list(CONTRACT.differences())


def test_without_the_package_all_of_it_is_gone(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    assert len(list(CONTRACT.differences())) == sum(map(len, (CONTRACT.calls, CONTRACT.fields))) + 6
