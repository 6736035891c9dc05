"""What can be chosen, and what is measured then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import main
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.launch import Surroundings
from benchmarks.peers.measure_group import room_for
from benchmarks.peers.notes import case_name
from benchmarks.peers.peers_folder import PeersFolder
from benchmarks.peers.plan import Case, plan, requests_of
from benchmarks.peers.process import Ports
from benchmarks.peers.settings import settings
from penstock.loadtest.errors import LoadTestError


def groups(**given: Any) -> list[tuple[str, str, tuple[str, ...], int]]:
    found = plan(settings({"dir": "d", **given}))
    return [(group.table, group.model, group.contenders, len(group.cases)) for group in found]


def test_lists_come_as_text() -> None:
    chosen = settings({"dir": "d", "concurrency": ["1", "16"], "only": ["triton"], "seconds": "0.5"})
    assert (chosen.concurrency, chosen.only, chosen.seconds) == ((1, 16), ("triton",), 0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "--dir FOLDER is required: where the peers are"),
        ({"dir": "d", "only": ["vlm"]}, "only: vlm is none of openvino, vllm"),
        ({"dir": "d", "models": ["gpt"]}, "models: gpt is none of tiny, qwen05b-shape"),
        ({"dir": "d", "tables": ["x", "tensors"]}, "tables: x is none of"),
        ({"dir": "d", "tensor_models": ["sum"]}, "tensor-models: sum is none of add_sub, identity"),
        ({"dir": "d", "weights": ["int2"]}, "weights: int2 is none of native, int8, int4"),
        ({"dir": "d", "concurrency": ["0"]}, "concurrency"),
        ({"dir": "d", "repeat": "some"}, "repeat: "),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(LoadTestError, match=said):
        settings(given)


def test_each_peer_meets_penstock_with_the_same_engine_and_with_its_own_choice() -> None:
    assert groups(only=["vllm"], models=["tiny"], concurrency=["1", "4"]) == [
        ("generation", "tiny", ("vllm", "penstock-vllm", "penstock-vllm-engine", "penstock"), 3)
    ]


def test_each_peer_is_measured_in_the_forms_that_it_has() -> None:
    """Small weights beside Penstock's own choice alone."""
    found = plan(settings({"dir": "d", "tables": ["generation"], "models": ["tiny"], "weights": ["int8", "int4"]}))
    assert [(group.weights, group.contenders) for group in found] == [
        ("int8", ("openvino", "penstock")),
        ("int8", ("vllm", "penstock")),
        ("int8", ("llamacpp", "penstock")),
        ("int4", ("openvino", "penstock")),
        ("int4", ("llamacpp", "penstock")),
    ]
    assert CONTENDERS["llamacpp"].computing("int4") == "weights in Q4_K_M; {threads}"
    assert CONTENDERS["penstock"].computing("int4") == "weights in int4; {threads}"


@pytest.mark.parametrize(("weights", "flag"), [("native", "auto"), ("int4", "int4")])
def test_penstock_gets_the_weights_of_the_group(weights: str, flag: str, tmp_path: Path) -> None:
    at = Surroundings(
        peers_folder=PeersFolder(tmp_path), model="tiny", weights=weights, cores=(0, 1), places=4, timeout=1
    )
    start = CONTENDERS["penstock"].start
    assert start is not None
    argv = list(start(at, Ports(1, 2, 3)).argv)
    assert argv[argv.index("--weights") + 1] == flag


def test_several_peers_in_one_table_meet_penstock_once() -> None:
    chosen = {
        "tables": ["generation"],
        "only": ["llamacpp", "openvino", "triton"],
        "models": ["tiny"],
        "together": True,
    }
    assert groups(**chosen, weights=["int8"], concurrency=["1"], sampled=[]) == [
        ("generation", "tiny", ("llamacpp", "openvino", "penstock"), 1)
    ]


def test_chats_have_tables_of_their_own_and_images_need_eyes() -> None:
    models = ["lfm2-350m-shape", "smolvlm-500m-shape"]
    assert groups(tables=["turns", "images"], models=models) == [
        ("turns", "lfm2-350m-shape", ("llamacpp", "penstock"), 1),
        ("images", "smolvlm-500m-shape", ("llamacpp", "penstock"), 1),
    ]


def test_prompts_are_kept_for_chats_alone(tmp_path: Path) -> None:
    """With room for all of a session."""
    for table, flag, cache in (("turns", "--prefix-caching", False), ("generation", "--no-prefix-caching", True)):
        chosen = settings({"dir": "d", "output_tokens": 16})
        at = Surroundings(
            peers_folder=PeersFolder(tmp_path),
            model="tiny",
            cores=(0, 1),
            places=1,
            timeout=1,
            sequence=room_for(table, chosen),
            reuse=table == "turns",
        )
        ours, theirs = (CONTENDERS[name].start for name in ("penstock", "llamacpp"))
        assert ours is not None
        assert theirs is not None
        assert flag in ours(at, Ports(1, 2, 3)).argv
        argv = list(theirs(at, Ports(1, 2, 3)).argv)
        assert ("--no-cache-prompt" in argv) == cache
        assert argv[argv.index("--ctx-size") + 1] == ("16384" if table == "turns" else "1024")


def test_sampled_rows_come_last_in_the_generation_tables() -> None:
    [group] = plan(settings({"dir": "d", "only": ["llamacpp"], "models": ["tiny"], "concurrency": [1, 4]}))
    assert [(case.concurrency, case.sampled) for case in group.cases] == [(1, False), (4, False), (32, True)]
    assert [case_name(case) for case in group.cases[1:]] == ["4 at a time", "32 at a time, sampled"]


def test_protocols_that_a_peer_does_not_offer_are_left_out() -> None:
    found = plan(settings({"dir": "d", "only": ["litserve", "mlserver"], "in_flight": ["1"]}))
    assert {group.peer: {case.protocol for case in group.cases} for group in found} == {
        "mlserver": {"kserve-http", "kserve-grpc"},
        "litserve": {"kserve-http"},
    }


def test_tensors_of_one_model() -> None:
    [group] = plan(settings({"dir": "d", "only": ["triton"], "tensor_models": ["identity"], "in_flight": ["1"]}))
    assert [case_name(case) for case in group.cases] == [
        "identity JSON 1 at a time",
        "identity binary 1 at a time",
        "identity gRPC 1 at a time",
    ]


def test_everything_is_measured_and_everybody_is_known() -> None:
    found = groups()
    assert [table for table, *_ in found] == ["paced", "streaming", *["tensors"] * 4, *["generation"] * 8]
    assert {name for _, _, names, _ in found for name in names} == set(CONTENDERS)
    assert groups(tables=["streaming", "paced"], only=["triton"]) == [], "these are of no peer that has a name"


def test_the_command_takes_each_of_its_settings_as_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` among them, which is no name for the command's own function."""
    assert main(["peers", "--dir", str(tmp_path), "--no-run", "--only", "litserve"]) == 1
    assert "litserve: it is not set up (--setup)" in capsys.readouterr().err


def test_what_generates_says_how_it_computes() -> None:
    for group in plan(settings({"dir": "d", "tables": ["generation"]})):
        for name in group.contenders:
            told = CONTENDERS[name].engine.format(threads="2 threads", engine_threads="1 thread")
            assert told.startswith("bf16"), name
            assert told.endswith("1 thread" if "vllm" in name else "2 threads"), name


@pytest.mark.parametrize("name", ["penstock", "penstock-torch", "penstock-vllm", "penstock-vllm-engine"])
def test_only_the_number_of_tokens_bounds_a_step(name: str, tmp_path: Path) -> None:
    """As in the peers. vLLM's own scheduler has no target for the time of a step, and Penstock refuses one for it."""
    at = Surroundings(peers_folder=PeersFolder(tmp_path), model="tiny", cores=(0, 1), places=4, timeout=1)
    start = CONTENDERS[name].start
    assert start is not None
    argv = [str(word) for word in start(at, Ports(1, 2, 3)).argv]
    assert argv[argv.index("--max-num-batched-tokens") + 1] == "2048"
    if name == "penstock-vllm-engine":
        assert "--itl-target-ms" not in argv
    else:
        assert argv[argv.index("--itl-target-ms") + 1] == "0"


@pytest.mark.parametrize(
    ("model", "places", "waves", "requests"),
    [("tiny", 1, 1, 32), ("tiny", 64, 2, 512), ("qwen05b-shape", 1, 1, 2), ("qwen05b-shape", 16, 1, 16)],
)
def test_small_models_get_more_requests(model: str, places: int, waves: int, requests: int) -> None:
    case = Case(table="generation", model=model, protocol="openai-completions", concurrency=places)
    assert requests_of(case, settings({"dir": "d", "waves": waves})) == requests


def test_help_says_defaults_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["peers", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(default: 1,4,16,64)" in said
    assert "--concurrency N[,N]" in said
    assert "(default: (" not in said
