"""`sequence_batching` in configurations: what is filled in, what is refused and in which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.classic.batching.sequences.table import States
from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.models.repository.config_checks import check_supported
from penstock.gateway.models.repository.defaults import complete
from support.classic import model_config

IO = """
    max_batch_size: 4
    input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
"""
START = "kind: CONTROL_SEQUENCE_START"
CORRID = "kind: CONTROL_SEQUENCE_CORRID"
STATE = 'input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ -1, 2 ]'


def config(sequences: str, backend: str = "python") -> ModelConfig:
    found = model_config(f'name: "m" backend: "{backend}"', IO, f"sequence_batching {{ {sequences} }}")
    complete(found, "m", Path("/nonexistent"))
    return found


def control(text: str, name: str = "C") -> str:
    return f'control_input {{ name: "{name}" control {{ {text} }} }}'


def initial(text: str) -> str:
    return f"state {{ {STATE} initial_state {{ {text} }} }}"


def test_what_is_left_out_is_what_triton_takes() -> None:
    found = config("oldest { }").sequence_batching
    assert found.max_sequence_idle_microseconds == 1_000_000
    assert list(found.oldest.preferred_batch_size) == [4]
    assert not config("").sequence_batching.HasField("oldest")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (control(START), "must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for CONTROL_"),
        (control(START + " int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]"), "specifies more than one from"),
        (control(START + " fp32_false_true: [ 0 ]"), "control 'fp32_false_true' must have exactly 2 entries for"),
        (control(START + " int32_false_true: [ 0, 1 ]", ""), "control tensor must have a name for m"),
        (
            control(START + " int32_false_true: [ 0, 1 ]") + control(CORRID + " data_type: TYPE_UINT64"),
            "control tensor 'C' is specified for multiple control kinds for m",
        ),
        (
            control(START + " int32_false_true: [ 0, 1 ]") + control(START + " int32_false_true: [ 0, 1 ]", "D"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (control(CORRID + " data_type: TYPE_FP32"), "unexpected data type for control CONTROL_SEQUENCE_CORRID for m."),
        (control(CORRID), "unexpected data type for control CONTROL_SEQUENCE_CORRID for m."),
        (control(CORRID + " int32_false_true: [ 0, 1 ]"), "must not specify either 'int32_false_true'"),
        ("oldest { preferred_batch_size: [ 0 ] }", "preferred batch size must be positive for m"),
        ("oldest { preferred_batch_size: [ 5 ] }", "preferred batch size must be <= max batch size for m"),
        ("oldest { max_candidate_sequences: -1 }", "max candidate sequences must not be negative for m"),
        ("direct { minimum_slot_utilization: 1.5 }", "minimum slot utilization must be in range (0.0, 1.0] for m"),
        ("direct { minimum_slot_utilization: nan }", "minimum slot utilization must be in range (0.0, 1.0] for m"),
        (f"state {{ {STATE} }} state {{ {STATE} }}", "State input name 'S' specified more than once."),
        ('state { output_name: "T" data_type: TYPE_INT32 dims: [ 1 ] }', "state must have an input_name for m"),
        ('state { input_name: "S" output_name: "T" dims: [ 1 ] }', "must specify 'data_type' for m"),
        ('state { input_name: "S" output_name: "T" data_type: TYPE_INT32 }', "must specify 'dims'"),
        (f"state {{ {STATE} use_growable_memory: true }}", "you must also enable 'use_single_buffer'"),
        (f"state {{ {STATE} initial_state {{ }} initial_state {{ }} }}", "must contain exactly one or zero element"),
        (initial("data_type: TYPE_FP32"), "'initial_state' field of state 'S' does not match the state data type"),
        (initial("data_type: TYPE_INT32"), "Field 'name' must be set when using initial_state for state input 'S'."),
        (initial('name: "i" data_type: TYPE_INT32 dims: [ 1 ]'), "for state input 'S'. 1 != 2"),
        (initial('name: "i" data_type: TYPE_INT32 dims: [ -1, 2 ]'), "contains variable dimensions"),
        (initial('name: "i" data_type: TYPE_INT32 dims: [ 1, 3 ]'), "doesn't match 'state' dim description. 3 != 2"),
        (initial('name: "i" data_type: TYPE_INT32 dims: [ 1, 2 ]'), "to have state_data set"),
        (initial('name: "i" data_type: TYPE_INT32 dims: [ 1, 2 ] data_file: "../x"'), "inside the model's folder"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(told)):
        check_supported(config(text))


def test_responses_of_sequences_are_not_cached() -> None:
    found = config("")
    found.response_cache.enable = True
    with pytest.raises(InvalidRequestError, match="does not currently support model m with sequence batching"):
        check_supported(found)


@pytest.mark.parametrize("backend", ["penstock", "vllm", "tensorrtllm"])
def test_language_models_schedule_by_themselves(backend: str) -> None:
    with pytest.raises(UnsupportedError, match="schedules by itself"):
        check_supported(config("", backend))


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "there is no file 'i' in the model's initial_state folder"), (b"1234", "expects 8 bytes, but the data")],
)
def test_files_of_initial_states_are_there_and_long_enough(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "initial_state").mkdir()
        (tmp_path / "initial_state/i").write_bytes(content)
    found = config(initial('name: "i" data_type: TYPE_INT32 dims: [ 1, 2 ] data_file: "i"'))
    check_supported(found)
    with pytest.raises(InvalidRequestError, match=told):
        States(found, tmp_path)


def test_a_state_has_its_bounds(tmp_path: Path) -> None:
    found = config('state { input_name: "S" output_name: "T" data_type: TYPE_INT32 dims: [ 1000000, 1000000 ] }')
    check_supported(found)
    with pytest.raises(InvalidRequestError, match="the state 'S' has more than"):
        States(found, tmp_path)
