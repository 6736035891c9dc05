"""Which settings of vLLM go through, and what is said of the others. Needs no vLLM."""

from __future__ import annotations

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.engines.vllm.engine_args import checked

KNOWN = ("seed", "enforce_eager", "hf_overrides", "load_format", "speculative_config", "data_parallel_size", "model")


def test_fields_of_vllm_go_through():
    given = {"seed": 3, "enforce_eager": True, "hf_overrides": {"a": 1}, "load_format": "dummy"}
    assert checked(given, KNOWN) == given
    assert checked({"data_parallel_size": 1, "speculative_config": {}}, KNOWN) == {
        "data_parallel_size": 1,
        "speculative_config": {},
    }


def test_what_says_how_to_log_is_accepted():
    assert checked({"disable_log_requests": True, "enable_log_requests": False, "disable_log_stats": True}, ()) == {}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enforce_eagre", True, "no setting 'enforce_eagre'; did you mean enforce_eager"),
        ("zzz", 1, "no setting 'zzz'$"),
        ("model", "x", "model is Penstock's setting model"),
        ("enable_lora", True, "setting lora, or lora_directory"),
        ("num_gpu_blocks_override", 9, "setting num_kv_blocks"),
        ("tokenizer", "x", "rendered and tokenized by Penstock"),
        ("trust_remote_code", True, "never runs code that comes with a model"),
        ("data_parallel_size", 2, "drives one vLLM engine"),
        ("load_format", "pt", "pickled weights"),
    ],
)
def test_others_are_refused_with_the_reason(name, value, message):
    with pytest.raises(InvalidRequestError, match=message):
        checked({name: value}, KNOWN)
