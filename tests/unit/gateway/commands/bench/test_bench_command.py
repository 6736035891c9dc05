"""`penstock bench` from the command line: reports, JSON, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.cli import main
from support.cpu import own_cache

SMALL = ("--prompt-lengths", "8,20", "--batch-sizes", "1,2", "--context-lengths", "16", "--decode-steps", "2")


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", own_cache(tmp_path / "cache"))


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said, in one line."""
    try:
        status = main(["bench", *arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    told = capsys.readouterr()
    assert status in (1, 2)
    assert told.out == ""
    assert "Traceback" not in told.err
    return told.err.splitlines()[0]


def report(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON and the table."""
    file = tmp_path / "report.json"
    assert main(["bench", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text()), capsys.readouterr().out


def test_the_demo_model_on_openvino(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, shown = report(
        capsys, tmp_path, "engine", "--weights", "int8", "--kv-cache-dtype", "u4", "--threads", "1", *SMALL
    )
    assert (found["model"], found["schema"]) == ("penstock-demo", "penstock-bench-engine/1")
    assert found["runner"].startswith("openvino ")
    assert found["work"]["weights"] == "int8"
    # of a token: 6 layers, 2 heads of 64; 4 bits each, and 8 bytes for 32 of them
    assert found["work"]["kv_bytes"] == [6 * 2 * 2 * 64 * 3 // 4]
    assert "kv u4" in found["runner"]
    assert found["work"]["token_flops"] == 2 * 6 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 768)
    assert [row["tokens"] for row in found["prompts"]] == [8, 20]
    assert [(row["batch_size"], row["context_length"]) for row in found["decode"]] == [(1, 16), (2, 16)]
    for row in found["decode"]:
        least, middle, most = (row["step_ms"][name] for name in ("least", "median", "most"))
        assert 0 < least <= middle <= most
        assert row["bytes"] > found["work"]["weight_bytes"]
        expected = row["bytes"] / (middle / 1e3) / row["read_speed"]["most"]
        assert row["share_of_read_speed"] == pytest.approx(expected)
        assert row["share_of_flops"] > 0
    [product] = found["products"]
    assert product["threads"] == 1
    assert found["memory"]["loaded"]["anonymous"] > 0
    assert {"weights", "compile", "warm-up"} <= found["load"]["stages"].keys()
    assert sum(found["load"]["stages"].values()) <= found["load"]["seconds"]
    assert "large products in the same types, threads 1:" in shown


def test_an_engine_that_counts_nothing_has_no_shares(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, shown = report(capsys, tmp_path, "engine", "--engine", "simulated", *SMALL)
    assert found["work"] is None
    assert found["products"] == []
    assert {row["share_of_read_speed"] for row in found["decode"]} == {None}
    assert "shares: none" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "tensorrt_llm"), "the engine tensorrt_llm runs under its own scheduler"),
        (("--context-lengths", "5000", "--prompt-lengths", "5000"), "nothing can be measured"),
        (("--repeats", "0"), "--repeats: expected a whole number >= 1"),
        (("--batch-sizes", "1,x"), "--batch-sizes"),
        (("--weights", "int5"), "invalid choice: 'int5'"),
        (("--kv-cache-dtype", "u4-u8"), "invalid choice: 'u4-u8'"),
        (("--engine", "torch", "--weights", "int4"), "weights: the torch engine keeps"),
        (("--policy", "fair"), "there is no flag --policy"),
        (("nowhere/at/all",), "nowhere/at/all is neither a folder or file here"),
        (("--json", "nowhere/report.json"), "No such file or directory"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in failed(capsys, "engine", *arguments)


def test_a_variable_for_servers_does_not_change_who_schedules_unseen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SCHEDULER", "engine")
    assert "the engine simulated runs under its own scheduler" in failed(capsys, "engine", "--engine", "simulated")


def test_models_of_vectors_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    (tmp_path / "modules.json").write_text("[]")
    assert "makes vectors" in failed(capsys, "engine", str(tmp_path))


def test_perplexity_with_other_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Return the absolute value of a number. The argument may be an integer or a float.\n" * 3)
    given = ("--text", str(text), "--context-length", "40", "--dtype", "f32", "--weights", "f32")
    others = ("--compare", "threads=1", "--compare", "weights=int4,activations=f32")
    found, shown = report(capsys, tmp_path, "perplexity", *given, *others)
    assert (found["context_length"], found["stride"], found["text"]["source"]) == (40, 20, "text.txt")
    assert found["counted"] == found["text"]["tokens"] - 1
    base, same, int4 = found["rows"]
    assert base["divergence"] is None
    assert base["perplexity"] > 1
    assert same["perplexity"] == pytest.approx(base["perplexity"], rel=1e-4)
    assert same["divergence"]["most"] < 1e-6
    assert same["divergence"]["same_best"] == 1
    assert int4["divergence"]["mean"] > 1e-4
    assert "int4" in int4["runner"]
    assert "weights=int4,activations=f32" in shown
    assert found["without_divergence"] == ""


def test_the_text_is_the_standard_library_s(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, _ = report(capsys, tmp_path, "perplexity", "--text-tokens", "300", "--stdlib", "sources")
    assert found["text"]["source"].startswith("sources of the standard library of Python 3")
    assert found["text"]["tokens"] == 300
    assert found["counted"] == 299
    assert (found["context_length"], found["stride"]) == (512, 256)
    assert 1 < found["rows"][0]["perplexity"] < 4096, "better than guessing evenly among the vocabulary"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "simulated"), "the simulated engine has no logprobs"),
        (("--compare", "policy=fair"), "'policy=fair' is none of the settings of a model"),
        (("--compare", "weights=int5"), "--weights: 'int5' is not one of auto, bf16"),
        (("--context-length", "2048"), "the context has room for 2047"),
        (("--context-length", "64", "--stride", "64"), "stride 64 is not below context-length, 64"),
        (("--text", "nowhere.txt", "--stdlib", "sources"), "there can be only one text"),
        (("--text", "nowhere.txt"), "No such file or directory: 'nowhere.txt'"),
    ],
)
def test_refusals_of_perplexity(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    assert words in failed(capsys, "perplexity", *arguments)


def test_texts_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes(b"\xe9\xe9")
    assert "no token with another one before it" in failed(capsys, "perplexity", "--text", str(tmp_path / "empty"))
    assert "is not in UTF-8" in failed(capsys, "perplexity", "--text", str(tmp_path / "latin"))
