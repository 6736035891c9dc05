"""Models that our scheduler's block tables cannot serve are refused with the reason and the way out."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError
from penstock.engines.registry import EngineSpec, load_runner
from penstock.engines.vllm.engine_args import check_arguments, check_cache, check_generates, check_model
from support.models import make_model

SERVED = {
    "runner_type": "generate",
    "is_encoder_decoder": False,
    "is_multimodal_model": False,
    "is_hybrid": False,
    "has_inner_state": False,
}


def config_of(speculative_config=None, **model):
    return SimpleNamespace(model_config=SimpleNamespace(**SERVED | model), speculative_config=speculative_config)


def test_a_plain_decoder_is_served():
    check_model(config_of())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of(is_multimodal_model=True), "multimodal"),
        (config_of(is_hybrid=True), "state outside the KV cache"),
        (config_of(has_inner_state=True), "state outside the KV cache"),
        (config_of(speculative_config=object()), "speculative decoding"),
    ],
)
def test_other_models_are_refused(config, reason):
    with pytest.raises(UnsupportedError, match=reason) as refusal:
        check_model(config)
    assert refusal.value.param == "scheduler"


@pytest.mark.parametrize("check", [check_model, check_generates])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of(runner_type="pooling"), "does not generate text"),
        (config_of(is_encoder_decoder=True), "encoder-decoder"),
    ],
)
def test_what_neither_scheduler_can_run_is_not_left_to_the_other(check, config, reason):
    with pytest.raises(UnsupportedError, match=f"cannot run this model here: .*{reason}") as refusal:
        check(config)
    assert refusal.value.param is None


def test_settings_of_the_other_scheduler_are_refused_by_name():
    check_arguments({"seed": 1, "enforce_eager": True})
    with pytest.raises(UnsupportedError, match="kv_transfer_config and speculative_config ") as refusal:
        check_arguments(["speculative_config", "kv_transfer_config", "seed"])
    assert refusal.value.param == "scheduler"


@pytest.mark.usefixtures("needs_vllm")
@pytest.mark.parametrize(
    ("specs", "reason"),
    [([], "no KV cache"), ([SimpleNamespace()], "kind SimpleNamespace"), ([SimpleNamespace()] * 2, "kind Simple")],
)
def test_caches_of_another_kind_are_refused(specs, reason):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    with pytest.raises(UnsupportedError, match=reason):
        check_cache(SimpleNamespace(kv_cache_groups=groups))


@pytest.mark.usefixtures("needs_vllm")
def test_weights_that_are_not_safetensors_are_not_looked_at(tmp_path):
    folder = make_model(tmp_path, hidden_size=128, head_dim=32)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EngineError, match="no safetensors"):
        load_runner(EngineSpec(runner="vllm", options={"model_dir": str(folder)}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_args": {"block_size": "abc"}}, "block_size: Input should be a valid integer[^\\n]*"),
        ({"quantization": "nonsense"}, "Unknown quantization method: nonsense[^\\n]*"),
    ],
)
def test_what_vllm_refuses_is_told_in_one_line(model_dir, settings, message):
    with pytest.raises(InvalidRequestError) as refusal:
        load_runner(EngineSpec(runner="vllm", options={"model_dir": str(model_dir)} | settings))
    assert re.fullmatch(f"vLLM refuses this configuration: {message}", refusal.value.message)
