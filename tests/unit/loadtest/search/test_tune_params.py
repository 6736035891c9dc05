"""What is varied, in which order, and what is best."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Sample
from penstock.loadtest.report.model import Validity
from penstock.loadtest.search.slo import parse_bounds
from penstock.loadtest.tune.findings import Tried, TuneReport
from penstock.loadtest.tune.main import exit_status, main, plan
from penstock.loadtest.tune.objective import NOTHING, judge, parse_objective
from penstock.loadtest.tune.options import TuneOptions
from penstock.loadtest.tune.params import (
    Combination,
    Param,
    Score,
    config_lines,
    configured,
    exhaustive,
    flags,
    of_models,
    parse_params,
    quick,
)
from unit.loadtest.search.computed import answered, chosen, report_of


def test_parameters_are_read() -> None:
    params = parse_params(["max-num-seqs=16,32", "--policy=fcfs,fair", "my.model.max-batch-size=4, 8"])
    assert params == [
        ("max_num_seqs", ["16", "32"]),
        ("policy", ["fcfs", "fair"]),
        ("my.model.max_batch_size", ["4", "8"]),
    ]
    assert [param.of_model for param in params] == [False, False, True]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "--param is required"),
        (["max_num_seqs"], "NAME=VALUE"),
        (["=1"], "NAME=VALUE"),
        (["a=1,,2"], "NAME=VALUE"),
        (["a=1", "a=2"], "given twice"),
        (["model.speed=1"], "fields are"),
        ([".max_batch_size=1"], "fields are"),
        (["model.max_batch_size=many"], "whole numbers"),
    ],
)
def test_parameters_that_cannot_be(texts: list[str], said: str) -> None:
    with pytest.raises(LoadTestError, match=said):
        parse_params(texts)


def test_flags_and_fields_of_models_are_told_apart() -> None:
    combination = {"max_num_seqs": "16", "a.instance_count": "2", "a.max_batch_size": "8"}
    assert flags(combination) == ["--max-num-seqs=16"]
    assert of_models(combination) == {"a": {"instance_count": 2, "max_batch_size": 8}}


def test_a_models_configuration_keeps_the_rest() -> None:
    config = {
        "name": "a",
        "max_batch_size": 4,
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "dynamic_batching": {"preferred_batch_size": [4, 16], "preserve_ordering": True},
    }
    changed = configured(config, {"instance_count": 3, "max_batch_size": 8, "max_queue_delay_microseconds": 50})
    assert changed == {
        "name": "a",
        "max_batch_size": 8,
        "instance_group": [{"kind": "KIND_CPU", "count": 3}],
        "dynamic_batching": {
            "preferred_batch_size": [4],
            "preserve_ordering": True,
            "max_queue_delay_microseconds": 50,
        },
    }
    assert config["max_batch_size"] == 4
    assert configured({}, {"instance_count": 2}) == {"instance_group": [{"count": 2}]}
    with pytest.raises(LoadTestError, match="sequence batcher"):
        configured({"sequence_batching": {}}, {"max_queue_delay_microseconds": 5})


def test_fields_are_told_as_triton_writes_them() -> None:
    assert config_lines({"instance_count": 2, "max_batch_size": 8, "max_queue_delay_microseconds": 5}) == [
        "instance_group [ { count: 2 } ]",
        "max_batch_size: 8",
        "dynamic_batching { max_queue_delay_microseconds: 5 }",
    ]


class Counted:
    """Scores combinations, and counts how often it is asked."""

    def __init__(self, scores: dict[tuple[str, ...], float]) -> None:
        self.asked: Counter[tuple[str, ...]] = Counter()
        self._scores = scores

    def __call__(self, combination: Combination) -> Score:
        key = tuple(combination.values())
        self.asked[key] += 1
        return (self._scores[key],)

    @property
    def best(self) -> float:
        return max(self._scores[key] for key in self.asked)


gains = st.lists(st.lists(st.integers(-100, 100), min_size=1, max_size=4), min_size=1, max_size=4)


@given(gains=gains)
def test_quick_finds_the_best_of_parameters_that_do_not_depend_on_each_other(gains: list[list[int]]) -> None:
    params = [Param(f"p{place}", [str(index) for index in range(len(each))]) for place, each in enumerate(gains)]
    keys = list(product(*(param.values for param in params)))
    scores = {key: float(sum(each[int(value)] for each, value in zip(gains, key, strict=True))) for key in keys}
    fast, slow = Counted(scores), Counted(scores)
    quick(params, fast)
    exhaustive(params, slow)
    assert fast.best == slow.best == sum(map(max, gains))
    assert set(slow.asked) == set(keys)
    assert set(fast.asked.values()) == set(slow.asked.values()) == {1}
    assert len(fast.asked) <= 1 + 2 * sum(len(each) - 1 for each in gains)


@given(scores=st.lists(st.integers(0, 9), min_size=27, max_size=27))
def test_quick_ends_where_no_single_change_helps(scores: list[int]) -> None:
    params = [Param(name, ["0", "1", "2"]) for name in "abc"]
    table = dict(zip(product("012", repeat=3), map(float, scores), strict=True))
    counted = Counted(table)
    quick(params, counted)
    tops = [key for key in counted.asked if table[key] == counted.best]
    assert any(
        all(table[(*key[:place], value, *key[place + 1 :])] <= table[key] for place in range(3) for value in "012")
        for key in tops
    )


def test_objectives_are_read() -> None:
    assert parse_objective("requests_per_s", chosen())[:2] == ("requests_per_s", "Requests/s")
    assert parse_objective("ttft_p99", chosen()) == ("ttft_ms.p99", "TTFT p99 ms", False)
    assert parse_objective("goodput", chosen(goodput=("e2e:1",))).path == "goodput.requests_per_s"
    for text in ("speed", "ttft", "errors", "completed"):
        with pytest.raises(LoadTestError, match="is none of"):
            parse_objective(text, chosen())
    with pytest.raises(LoadTestError, match="good request"):
        parse_objective("goodput", chosen())


@pytest.mark.parametrize(
    ("protocol", "rate", "without"),
    [
        ("openai-chat", "output_tokens_per_s", ()),
        ("openai-embeddings", "total_tokens_per_s", ("output_tokens_per_s", "ttft_p99")),
        ("kserve-grpc", "requests_per_s", ("output_tokens_per_s", "total_tokens_per_s", "tpot_p50")),
    ],
)
def test_the_objective_is_something_that_the_protocol_has(protocol: str, rate: str, without: tuple[str, ...]) -> None:
    settings = chosen(protocol=protocol)
    assert parse_objective("", settings).path == rate
    for text in without:
        with pytest.raises(LoadTestError, match=f"objective: {protocol} has no"):
            parse_objective(text, settings)


def test_what_is_best() -> None:
    """Usable figures before others, kept bounds before broken ones, then the objective; broken ones by how much."""

    def of(seconds: float, verdict: str = "valid") -> Score:
        samples = [answered(index, index / 10, index / 10, index / 10 + seconds) for index in range(20)]
        return judge(report_of(chosen(), samples, verdict), objective, bounds).score

    objective, bounds = parse_objective("e2e_p50", chosen()), parse_bounds(["e2e_p99:500"], goodput=False)
    order = [NOTHING, of(0.1, "invalid"), of(0.9), of(0.6), of(0.4), of(0.2)]
    assert order == sorted(order)
    assert len(set(order)) == len(order)


def test_runs_without_answers_and_without_the_figure() -> None:
    failed = report_of(chosen(), [Sample(index=0, intended=0.0, sent=0.0, ended=1.0, error="timeout")])
    objective = parse_objective("ttft_p50", chosen())
    judged = judge(replace(failed, validity=Validity(verdict="invalid")), objective, parse_bounds([], goodput=False))
    assert judged.misses == ["failed requests ≤ 1 %: nothing was completed"]
    assert judged.score > NOTHING
    whole = report_of(chosen(), [Sample(index=0, intended=0.0, sent=0.0, ended=1.0)])
    with pytest.raises(LoadTestError, match="no TTFT p50"):
        judge(whole, objective, [])


SEQS = TuneOptions(param=("max_num_seqs=1,2",))


def test_the_servers_command() -> None:
    base, url = plan(["serve", "m"], None, "openai-chat", SEQS)
    assert base.as_given == ["penstock", "serve", "m"]
    assert base.command[1:5] == ["-m", "penstock.gateway.cli", "serve", "m"]
    assert f"--http-port={base.url.rpartition(':')[2]}" in base.command
    assert base.url == url
    assert plan(["penstock", "serve", "m"], None, "", SEQS)[0].as_given == base.as_given
    base, url = plan(["vllm", "serve", "m"], "http://127.0.0.1:9/", "", SEQS)
    assert (base.command, base.url) == (["vllm", "serve", "m"], "http://127.0.0.1:9")


def test_grpc_is_measured_at_its_own_port() -> None:
    base, url = plan(["serve"], None, "kserve-grpc", SEQS)
    assert url != base.url
    assert f"--grpc-port={url.rpartition(':')[2]}" in base.command


def test_models_are_loaded_by_request_when_their_configuration_is_varied() -> None:
    tune = TuneOptions(param=("a.instance_count=1,2",))
    assert {"--model-control-mode=explicit", "--load-model=*"} <= set(plan(["serve"], None, "", tune)[0].command)
    words = ["serve", "--model-control-mode", "explicit", "--load-model", "a"]
    assert "--load-model=*" not in plan(words, None, "", tune)[0].command


@pytest.mark.parametrize(
    ("words", "url", "protocol", "param", "said"),
    [
        ([], None, "", "a=1", "which server"),
        (["vllm"], None, "", "a=1", "only penstock's ports are chosen"),
        (["vllm"], "http://x", "", "m.max_batch_size=1", "penstock's server only"),
        (["serve"], "http://x", "kserve-grpc", "a=1", "not with gRPC"),
    ],
)
def test_commands_that_cannot_be(words: list[str], url: str | None, protocol: str, param: str, said: str) -> None:
    with pytest.raises(LoadTestError, match=said):
        plan(words, url, protocol, TuneOptions(param=(param,)))


@pytest.mark.parametrize(
    ("best", "strict", "expected"), [(0, True, 0), (1, True, 4), (1, False, 0), (None, False, 1), (None, True, 1)]
)
def test_strict_is_about_the_best_server(best: int | None, strict: bool, expected: int) -> None:
    good = answered(0, 0.0, 0.0, 1.0)
    failed = Sample(index=1, intended=0.0, sent=0.0, ended=1.0, error="timeout")
    tried = [Tried(settings={}, report=report_of(chosen(), samples)) for samples in ([good], [good, failed])]
    study = TuneReport(date="", command="", objective="", more_is_better=True, bounds=[], tried=tried, best=best)
    assert exit_status(study, chosen(strict=strict)) == expected


def test_servers_have_no_label_of_their_own() -> None:
    with pytest.raises(LoadTestError, match="label: tune labels each server"):
        main({"server": ["serve", "m"], "param": ("max_num_seqs=1",), "label": "mine"})
