"""vLLM's step-level interface is not public: what this runner uses of it is still where it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.engines.errors import EngineError

pytestmark = pytest.mark.usefixtures("needs_vllm")


def contract():
    from penstock.engines.vllm import contract

    return contract


def test_the_installed_release_keeps_the_contract():
    assert list(contract().CONTRACT.differences()) == []


def test_what_has_moved_is_named(monkeypatch):
    it = contract()
    monkeypatch.setitem(it.FIELDS, "vllm.v1.core.sched.output:NewRequestData", ("req_id", "block_tables"))
    monkeypatch.setitem(it.CALLS, "vllm.v1.executor:Executor.execute_model", ("self", "batch"))
    monkeypatch.setitem(it.ORDERED, "vllm.v1.outputs:LogprobsLists", ("logprobs",))
    monkeypatch.setitem(it.FIELDS, "vllm.v1.core.sched.output:Gone", ("x",))
    with pytest.raises(EngineError) as caught:
        it.CONTRACT.check("vLLM", "0.33.9")
    message = str(caught.value)
    assert "0.33.9" in message
    assert "NewRequestData has no field 'block_tables'" in message
    assert "execute_model has no parameter 'batch'" in message
    assert "LogprobsLists begins with logprob_token_ids" in message
    assert "Gone is gone" in message


def test_what_has_moved_on_the_core_is_named():
    names = {name.split(".")[0]: object() for name in contract().ON_CORE}
    core = SimpleNamespace(**names | {"scheduler": SimpleNamespace(requests={})})
    with pytest.raises(EngineError) as caught:
        contract().check_core("0.33.9", core)
    assert "EngineCore.scheduler.kv_cache_config.num_blocks is gone" in str(caught.value)
    assert "requests" not in str(caught.value)


def test_engine_arguments_are_all_in_the_contract(model_dir):
    from penstock.engines.vllm.config import VLLMConfig
    from penstock.engines.vllm.start import OUR_SCHEDULER, engine_arguments, own_scheduler

    config = VLLMConfig(model_dir, num_blocks=4, adapters={"a": model_dir})
    names = {*engine_arguments(config), *OUR_SCHEDULER, *own_scheduler(config)}
    assert names <= set(contract().CALLS["vllm.engine.arg_utils:EngineArgs"])
