"""auto_complete_config, and the rules of pb_utils.ModelConfig."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
import venv
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.classic.base import abandoned
from penstock.classic.model_config import config_dict
from penstock.classic.python import backend as auto_complete
from penstock.classic.python.backend import PythonBackend
from penstock.classic.python.worker.model_config import ModelConfig
from penstock.classic.python.worker.wire import frame
from penstock.engines.errors import EngineError
from support.classic import until
from support.python_backend import ADD_SUB, ADD_SUB_CONFIG, loaded, outputs, parsed, request, write_model

COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        print("completing")
        if config.as_dict()["max_batch_size"] == 0:
            config.set_max_batch_size(8)
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [2, 3]})
        config.set_dynamic_batching()
        config.set_model_transaction_policy(dict(decoupled=True))
        return config
    def execute(self, requests): pass
"""


def completed(folder: Path, code: str, config: str = "", options: dict[str, str] | None = None) -> dict[str, Any]:
    found = parsed(config)
    PythonBackend(options or {}).auto_complete(found, write_model(folder, code))
    return config_dict(found)


def test_a_configuration_is_completed(tmp_path: Path) -> None:
    found = completed(tmp_path, COMPLETE, 'parameters { key: "k" value { string_value: "v" } }')
    assert found["max_batch_size"] == 8
    assert [(one["name"], one["data_type"], one["dims"]) for one in found["input"]] == [("X", "TYPE_FP32", [-1])]
    assert [(one["name"], one["data_type"], one["dims"]) for one in found["output"]] == [("Y", "TYPE_STRING", [2, 3])]
    assert "dynamic_batching" in found
    assert found["model_transaction_policy"]["decoupled"]
    assert found["parameters"]["k"]["string_value"] == "v"


def test_what_the_configuration_says_stays(tmp_path: Path) -> None:
    found = completed(tmp_path, COMPLETE, "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 5 }")
    assert found["max_batch_size"] == 4
    assert found["dynamic_batching"]["max_queue_delay_microseconds"] == 5


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ("", "def execute(self, r): pass"),
        ('input { name: "X" data_type: TYPE_FP32 dims: 1 }', "def execute(self, r): pass"),
        ("", "@staticmethod\n    def auto_complete_config(c): return c"),
    ],
)
def test_a_model_may_have_no_inputs_and_no_outputs(tmp_path: Path, config: str, code: str) -> None:
    found = completed(tmp_path, f"class TritonPythonModel:\n    {code}\n", config)
    assert ([tensor["name"] for tensor in found["input"]], found["output"]) == (["X"] if config else [], [])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "@staticmethod\n    def auto_complete_config(c): return None",
            "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object.",
        ),
        (
            "@staticmethod\n    def auto_complete_config(c): raise ValueError('why')",
            r"^ValueError: why \(line 5 of model.py\)$",
        ),
        ("@staticmethod\n    def auto_complete_config(c): import os; os._exit(3)", "ended early"),
        (
            "@staticmethod\n    def auto_complete_config(c):\n"
            "        c._model_config['input'] = [{'name': 'X', 'dims': 'many'}]; return c",
            "gave no valid configuration",
        ),
        (
            "@staticmethod\n    def auto_complete_config(c):\n"
            "        c.add_input({'name': 'X', 'data_type': 'TYPE_FP32'}); return c",
            "input 'X' in auto-complete-config function for model 'm' is missing 'dims' property.",
        ),
    ],
)
def test_what_cannot_be_completed(tmp_path: Path, code: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        completed(tmp_path, f"class TritonPythonModel:\n    {code}\n")


def test_a_model_that_thinks_too_long(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(c):\n        while True: pass\n"
    begun = time.monotonic()
    with pytest.raises(ValueError, match="within 1 s; --backend-config=python,stub-timeout-seconds"):
        completed(tmp_path, code, options={"stub-timeout-seconds": "1"})
    assert time.monotonic() - begun < 60


def test_imports_are_not_the_hook_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame(["hello", [], []]))
        rest = frame(["imported", [], []]) + frame(["completed", [], [], {"name": "m"}])
        late = threading.Timer(0.5, theirs.sendall, (rest,))
        late.start()
        assert auto_complete._converse(ours, {}, 0.2) == ("completed", [{"name": "m"}])
        late.join()
        monkeypatch.setattr(auto_complete, "_IMPORT_SECONDS", 0.05)
        theirs.sendall(frame(["hello", [], []]))
        with pytest.raises(ValueError, match=r"the model's imports did not end within 0\.05 s"):
            auto_complete._converse(ours, {}, 1000)
        theirs.sendall(frame(["hello", [], []]) + frame(["imported", [], []]))
        with pytest.raises(ValueError, match=r"auto_complete_config gave no answer within 0\.2 s; --backend-config="):
            auto_complete._converse(ours, {}, 0.2)


async def test_it_ends_when_nobody_waits_for_it(tmp_path: Path) -> None:
    begun, gone = tmp_path / "begun", Future[None]()
    abandoned.set(gone)
    code = f"open({str(begun)!r}, 'w')\nimport time\ntime.sleep(1000)\n" + COMPLETE
    completing = asyncio.create_task(asyncio.to_thread(completed, tmp_path, code))
    await until(begun.exists)
    gone.set_result(None)
    with pytest.raises(ValueError, match="ended early"):
        await completing


def test_complete_models_without_the_function_start_no_process(tmp_path: Path) -> None:
    code = "open('/nowhere/at/all')\n"  # it would fail
    before = parsed(ADD_SUB_CONFIG)
    PythonBackend({}).auto_complete(before, write_model(tmp_path, code))
    assert before == parsed(ADD_SUB_CONFIG)


def test_no_model_file(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"Python model file not found in 'm/1/model\.py'"):
        PythonBackend({}).auto_complete(parsed(""), tmp_path / "m" / "1")


@pytest.mark.parametrize("name", ["model.txt", "../model.py", ".py", "a/b.py"])
def test_file_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"Model name must end with '\.py'"):
        PythonBackend({}).auto_complete(parsed(f'default_model_filename: "{name}"'), write_model(tmp_path, ADD_SUB))


def test_other_runtimes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the python backend has no runtime 'libtriton_python\.so'"):
        PythonBackend({}).auto_complete(parsed('runtime: "libtriton_python.so"'), write_model(tmp_path, ADD_SUB))


async def infers(model: Any) -> bool:
    one = np.ones((1, 16), np.float32)
    response = await model.infer(request(INPUT0=one, INPUT1=one))
    return bool((outputs(response)["OUTPUT0"] == 2).all())


async def test_another_file_name(tmp_path: Path) -> None:
    write_model(tmp_path, ADD_SUB, file="other.py")
    async with loaded(tmp_path, "raise SystemExit", ADD_SUB_CONFIG + 'default_model_filename: "other.py"') as model:
        assert await infers(model)


async def test_a_python_based_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program belongs to the backend; the model's folder has what it reads."""
    program = tmp_path / "backends" / "mine" / "model.py"
    program.parent.mkdir(parents=True)
    program.write_text("import triton_python_backend_utils as pb_utils\n" + ADD_SUB)
    monkeypatch.setattr(PythonBackend, "program", program)
    async with loaded(tmp_path, "raise SystemExit") as model:
        assert await infers(model)


async def test_a_python_based_backend_in_the_backend_directory(tmp_path: Path) -> None:
    program = tmp_path / "backends" / "mine" / "model.py"
    program.parent.mkdir(parents=True)
    program.write_text("import triton_python_backend_utils as pb_utils\n" + ADD_SUB)
    folder = write_model(tmp_path, "", file="weights.py")
    backend = PythonBackend({"backend-directory": str(tmp_path / "backends")})
    config = parsed(ADD_SUB_CONFIG + 'backend: "mine"')
    assert backend._program(config, folder) == program


async def test_an_environment_of_its_own(tmp_path: Path) -> None:
    """One in which Penstock is not installed: it has nothing but numpy."""
    venv.create(tmp_path / "m" / "env", with_pip=False, symlinks=True)
    [site] = (tmp_path / "m" / "env" / "lib").glob("python*/site-packages")
    for folder in (Path(np.__file__).parent, Path(np.__file__).parent.parent / "numpy.libs"):
        if folder.exists():
            os.symlink(folder, site / folder.name)
    code = (
        "import sys\n"
        + ADD_SUB
        + """
    def initialize(self, args):
        for name in ("penstock", "msgspec"):
            try: __import__(name)
            except ImportError: continue
            raise RuntimeError(name + " is here")
        assert sys.prefix.endswith("/m/env"), sys.prefix
"""
    )
    parameter = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env" } }'
    force = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "yes" } }'
    async with loaded(tmp_path, code, ADD_SUB_CONFIG + parameter + force) as model:
        assert await infers(model)


async def test_an_environment_without_numpy(tmp_path: Path) -> None:
    venv.create(tmp_path / "m" / "env", with_pip=False, symlinks=True)
    parameter = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{tmp_path}/m/env" }} }}'
    with pytest.raises(EngineError, match="ended while it loaded the model"):
        async with loaded(tmp_path, ADD_SUB, ADD_SUB_CONFIG + parameter):
            pass


# pb_utils.ModelConfig


def config_of(**fields: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **fields}))


X = {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}


def test_tensors_are_added_once() -> None:
    config = config_of(input=[{"name": "X", "data_type": "TYPE_INVALID", "dims": []}])
    config.add_input(X)
    config.add_input(X | {"optional": True})
    config.add_output(X)
    assert config.as_dict()["input"] == [X | {"optional": True}]
    assert config.as_dict()["output"] == [X]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"data_type": "TYPE_INT8"},
            "configuration expects datatype TYPE_FP32 for input 'X', model provides TYPE_INT8",
        ),
        ({"dims": [5]}, r"the model expects dims \[5\] but the model configuration specifies dims \[4\]"),
        ({"optional": False}, "the model expects optional False"),
        ({"shape": 1}, "contains property other than 'name', 'data_type', 'dims' and 'optional'."),
    ],
)
def test_what_contradicts_the_configuration(given: dict[str, Any], text: str) -> None:
    config = config_of(input=[X | {"optional": True}])
    with pytest.raises(ValueError, match=text):
        config.add_input(X | given)


def test_properties_that_are_missing() -> None:
    for name in X:
        rest = {key: value for key, value in X.items() if key != name}
        with pytest.raises(ValueError, match=f"is missing '{name}' property"):
            config_of().add_output(rest)


def test_batching_is_set_unless_the_configuration_says_otherwise() -> None:
    config = config_of(max_batch_size=4)
    with pytest.raises(ValueError, match="configuration specified max_batch_size 4, but in auto-complete-config"):
        config.set_max_batch_size(2)
    config.set_dynamic_batching()
    assert config.as_dict()["dynamic_batching"] == {}
    with pytest.raises(ValueError, match="Configuration specified scheduling_choice as 'sequence_batching'"):
        config_of(sequence_batching={}).set_dynamic_batching()


def test_the_transaction_policy() -> None:
    config = config_of(model_transaction_policy={"decoupled": False})
    with pytest.raises(ValueError, match="which is already set to 'False'"):
        config.set_model_transaction_policy({"decoupled": True})
    with pytest.raises(ValueError, match="contains property other than 'decoupled'"):
        config.set_model_transaction_policy({"other": True})
