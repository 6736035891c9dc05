"""What `--sweep` means."""

from __future__ import annotations

import pytest

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.search.sweep import DEFAULT_SECONDS, at, check_load, one_of_a_row, parse_sweep
from unit.loadtest.search.computed import chosen


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("concurrency=1,4,16", "concurrency", [1, 4, 16]),
        ("concurrency=1:64:x2", "concurrency", [1, 2, 4, 8, 16, 32, 64]),
        ("concurrency=1:63:x2", "concurrency", [1, 2, 4, 8, 16, 32]),
        ("concurrency=4:12:+4", "concurrency", [4, 8, 12]),
        ("rate=0.5:2:+0.5", "rate", [0.5, 1, 1.5, 2]),
        ("rate=0.1:0.3:+0.1", "rate", [0.1, 0.2, 0.3]),
        ("rate=1:8:x2,10,8", "rate", [1, 2, 4, 8, 10]),
        ("prompt-tokens=128,1024", "prompt_tokens", [128, 1024]),
        ("rate=7", "rate", [7]),
    ],
)
def test_values_of_a_sweep(text: str, name: str, values: list[float]) -> None:
    assert parse_sweep(text) == (name, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "NAME=VALUES"),
        ("concurrency", "NAME=VALUES"),
        ("seed=1,2", "NAME=VALUES"),
        ("concurrency=", "not a number"),
        ("concurrency=1,,2", "not a number"),
        ("concurrency=1.5", "whole number"),
        ("concurrency=0", "whole number"),
        ("rate=0", "above 0"),
        ("rate=nan", "not a number"),
        ("rate=inf", "not a number"),
        ("concurrency=1:8", "FROM:TO:STEP"),
        ("concurrency=1:8:2", "FROM:TO:STEP"),
        ("concurrency=1:8:x1", "never gets"),
        ("concurrency=8:1:x2", "never gets"),
        ("concurrency=1:8:+0", "never gets"),
        ("concurrency=0:8:x2", "never gets"),
        ("rate=1:2:+0.0000001", "more than 1000"),
        ("rate=1:900:+1,1000:1900:+1", "at most 1000"),
    ],
)
def test_sweeps_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(LoadTestError, match=said):
        parse_sweep(text)


def test_a_value_is_set_where_it_belongs() -> None:
    plain = chosen()
    assert at(plain, "concurrency", 16.0).load.concurrency == 16
    assert isinstance(at(plain, "concurrency", 16.0).load.concurrency, int)
    assert at(plain, "rate", 2.5).load.rate == 2.5
    assert at(plain, "batch_size", 8.0).target.batch_size == 8
    assert at(plain, "prompt_tokens", 8.0).workload.prompt_tokens == 8
    assert at(plain, "output_tokens", 8.0).workload.output_tokens == 8


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rate": 2}, "concurrency"),
        ({"trace": "t.jsonl"}, "rate"),
        ({"trace": "t.jsonl"}, "prompt_tokens"),
        ({"dataset": "d.json"}, "output_tokens"),
        ({"mix": ["1 chat"]}, "prompt_tokens"),
    ],
)
def test_settings_that_would_change_nothing_are_refused(settings: dict[str, object], name: str) -> None:
    with pytest.raises(LoadTestError):
        check_load(chosen(**settings), name, "sweep")
    check_load(chosen(), name, "sweep")


def test_runs_of_a_row_have_an_end_and_no_row_of_their_own() -> None:
    assert one_of_a_row(chosen()).load.duration == DEFAULT_SECONDS
    assert one_of_a_row(chosen(requests=5)).load.duration is None
    assert one_of_a_row(chosen(dataset="d.json")).load.duration is None
    assert one_of_a_row(chosen(duration=3)).load.duration == 3
    assert one_of_a_row(chosen(sweep="rate=1")).search.sweep is None
