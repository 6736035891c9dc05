"""`penstock check` on repositories of every kind of model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.gateway.cli import main
from penstock.gateway.models.repository.classic_loader import ClassicLoaders
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings
from penstock.gateway.models.repository.storage import Repository

IO = """input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
"""
ECHO = f'backend: "identity"\n{IO}'
ENSEMBLE = """platform: "ensemble"
%s
ensemble_scheduling {
  step { model_name: "%s" model_version: -1 input_map { key: "INPUT0" value: "INPUT0" }
         output_map { key: "OUTPUT0" value: "OUTPUT0" } }
}
"""

REFUSED = ("above_wider", "around_itself", "elsewhere", "empty", "of_refused", "of_wider", "passive", "unreadable")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in {
        "above_wider": ENSEMBLE % (IO.replace("[ 4 ]", "[ 5 ]"), "of_wider"),
        "around_itself": ENSEMBLE % (IO, "around_itself"),
        "cached": ECHO + "response_cache { enable: true }\n",
        "echo": ECHO,
        "elsewhere": 'backend: "nowhere"\n' + IO,
        "hinted": ECHO + "optimization {\n  priority: PRIORITY_MAX\n}\n",
        "limited": ECHO + 'instance_group {\n  rate_limiter { resources { name: "R" count: 1 } }\n}\n',
        "of_echo": ENSEMBLE % (IO, "echo"),
        "of_refused": ENSEMBLE % (IO, "passive"),
        "of_wider": ENSEMBLE % (IO.replace("[ 4 ]", "[ 5 ]"), "echo"),
        "passive": ECHO + "instance_group {\n  passive: true\n}\n",
        "unreadable": "max_batch_size: many\n",
    }.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.pbtxt").write_text(ECHO)
    return tmp_path


def test_every_model_is_judged(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(repository), "--json"]) == 1
    verdicts = {each["model"]: each for each in json.loads(capsys.readouterr().out)}
    results = {name: each["result"] for name, each in verdicts.items()}
    assert results == {
        **dict.fromkeys(("echo", "of_echo"), "works"),
        **dict.fromkeys(("cached", "hinted", "limited"), "works differently"),
        **dict.fromkeys(REFUSED, "refused"),
    }
    notes = {name: [(note["where"], note["text"]) for note in each["notes"]] for name, each in verdicts.items()}
    assert notes["hinted"] == [("hinted/config.pbtxt:5", "optimization.priority has no effect")]
    assert notes["cached"][0][0] == "cached/config.pbtxt:4"
    [(where, text)] = notes["limited"]
    assert where == "limited/config.pbtxt:5"
    assert "has no effect: the server has the rate limiter off" in text
    [(where, text)] = notes["passive"]
    assert where == "passive/config.pbtxt:5"
    assert text.startswith("instance_group.passive of model 'passive' is not supported")
    assert "around_itself -> around_itself" in notes["around_itself"][0][1]
    assert "depends on 'passive'" in notes["of_refused"][0][1]
    assert "unreadable/config.pbtxt:1:17" in notes["unreadable"][0][1]
    assert all(notes[name] for name, result in results.items() if result != "works")


def test_lines_for_people(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in REFUSED:
        (repository / name).rename(repository / f".{name}")
    flags = ["--cache-config", "local,size=1000", "--rate-limit", "execution_count"]
    assert main(["check", str(repository), *flags]) == 0
    shown = capsys.readouterr().out
    assert shown == (
        "cached   works\necho     works\nhinted   works differently\n"
        "           hinted/config.pbtxt:5: optimization.priority has no effect\n"
        "limited  works\nof_echo  works\n5 models: 4 work, 1 works differently, 0 refused\n"
    )


def test_a_repository_that_cannot_be_read_is_another_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path / "nowhere")])
    assert ended.value.code == 2
    assert "nowhere" in capsys.readouterr().err


def test_custom_and_ragged_batching(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batching = "max_batch_size: 4\ndynamic_batching { }\n"
    library = 'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "/libs/volume.so" } }\n'
    ragged = ECHO.replace("dims: [ 4 ] }", "dims: [ -1 ] allow_ragged_batch: true }", 1)
    for name, config in {
        "library": ECHO + batching + library,
        "python": ECHO + batching + library,
        "ragged": ragged,
        "wrong": ragged + 'batch_input { data_type: TYPE_INT32 target_name: "C" source_input: "X" }\n',
    }.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    (tmp_path / "python/batchstrategy.py").touch()
    assert main(["check", str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        "library  refused\n"
        "           library/config.pbtxt:6: model 'library' has a library for custom batching (/libs/volume.so), which"
        " is not loaded here: write its rules in Python, in a file batchstrategy.py in the model's folder"
        " (docs/batching.md#custom-batching)\n"
        "python   works\n"
        "ragged   works\n"
        "wrong    refused\n"
        "           wrong/config.pbtxt: unknown source input name 'X' for wrong\n"
        "4 models: 2 work, 0 work differently, 2 refused\n"
    )


def test_machines_with_other_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text(ECHO + "instance_group { kind: KIND_GPU }")
    assert main(["check", str(tmp_path), "--gpus", "0"]) == 1
    assert main(["check", str(tmp_path), "--gpus", "2"]) == 0
    assert "works" in capsys.readouterr().out


def test_ensembles_of_embedding_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "search/1").mkdir(parents=True)
    (tmp_path / "search/config.pbtxt").write_text("""
        platform: "ensemble"
        input { name: "question" data_type: TYPE_STRING dims: [ 1 ] }
        output { name: "vector" data_type: TYPE_FP32 dims: [ 384 ] }
        ensemble_scheduling { step { model_name: "minilm" model_version: -1
            input_map { key: "text" value: "question" } output_map { key: "embedding" value: "vector" } } }
    """)
    assert main(["check", str(tmp_path)]) == 1
    assert "depends on 'minilm'" in capsys.readouterr().out
    assert main(["check", str(tmp_path), "--embedding-model", "minilm=some/folder"]) == 0


async def test_a_server_that_ends_says_why_for_each_model(repository: Path) -> None:
    settings = RepositorySettings()
    manager = ModelRepository(settings, ClassicLoaders({}), [Repository(str(repository))])
    try:
        with pytest.raises(Exception, match="--exit-on-error=false serves the others") as ended:
            await manager.start()
        lines = str(ended.value).splitlines()[1:]
        assert [line.split(":")[0].strip() for line in lines] == list(REFUSED)
        assert "instance_group.passive of model 'passive' is not supported" in lines[6]
    finally:
        await manager.stop()
