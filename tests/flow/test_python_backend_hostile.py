"""A model that does what a process of Triton's survives, and that finds around itself what it would find there."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from penstock.classic.base import reports_ready
from penstock.classic.classic_model import ClassicModel
from penstock.classic.messages import InferResponse
from penstock.classic.python.backend import PythonBackend
from penstock.engines.errors import EngineError, PenstockError
from support.classic import until
from support.python_backend import CPU, instances, loaded, outputs, parsed, request, write_model

HOSTILE = """
import argparse, asyncio, concurrent.futures, multiprocessing, os, signal, subprocess, sys, time
from from_the_working_directory import GREETING

class Own(BaseException):
    def __setattr__(self, name, value):
        raise TypeError("frozen")

def leave(how):
    match how:
        case "exit": sys.exit("enough")
        case "keyboard": raise KeyboardInterrupt("of the model")
        case "cancelled": raise asyncio.CancelledError("of the model")
        case "generator": raise GeneratorExit("of the model")
        case "own": raise Own("of the model")
        case "surrogate": raise RuntimeError("no file caf\\udce9.bin")

async def leave_later(how):
    await asyncio.sleep(0)
    leave(how)

class Unwritable:
    def write(self, text):
        sys.exit("no stderr")

class Text:
    def __str__(self):
        sys.exit("no text")

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        argparse.ArgumentParser().parse_args()
        return config

    def initialize(self, args):
        argparse.ArgumentParser().parse_args()
        self.argv = list(sys.argv)
        sys.stderr = Unwritable()

    def is_ready(self):
        sys.exit("never")

    def execute(self, requests):
        words = [r.inputs()[0].as_numpy().ravel()[0].decode() for r in requests]
        if any(word.startswith(("await ", "task ", "stop")) for word in words):
            return self.later(requests, words)
        return self.answers(requests, [self.answer(word) for word in words])

    async def later(self, requests, words):
        for word in words:
            how, _, what = word.partition(" ")
            if how == "task":
                await asyncio.create_task(leave_later(what))
            elif how == "await":
                await leave_later(what)
            elif how == "stop":
                asyncio.get_running_loop().stop()
                await asyncio.sleep(0.01)
        return self.answers(requests, [str(os.getpid())] * len(words))

    def answer(self, word):
        leave(word)
        match word:
            case "argv": return repr(self.argv)
            case "path": return repr(sys.path[0]) + GREETING
            case "text": return Text()
            case "children":
                with concurrent.futures.ThreadPoolExecutor() as pool:
                    return pool.submit(self.children).result()
        if word.startswith("/"):  # says that it has begun, and waits for the word to go on
            open(word, "w").close()
            while os.path.exists(word):
                time.sleep(0.01)
        return str(os.getpid())

    def children(self):
        program = subprocess.Popen(["sleep", "1000"])
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        fork.start()
        program.terminate()
        fork.terminate()
        fork.join()
        return repr([program.wait(), fork.exitcode])

    def answers(self, requests, found):
        made = []
        for each in found:
            array = np.empty((1, 1), np.object_)
            array[0, 0] = each
            made.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", array)]))
        if not DECOUPLED:
            return made
        for r, response in zip(requests, made):
            r.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        open("finalized", "w").close()
        raise KeyboardInterrupt("late")
"""
CONFIG = f"""
max_batch_size: 16
input [ {{ name: "X" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_STRING dims: [ 1 ] }} ]
dynamic_batching {{ }}
{CPU}
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"
WAYS = {
    "exit": "SystemExit: enough",
    "keyboard": "KeyboardInterrupt: of the model",
    "cancelled": "CancelledError: of the model",
    "generator": "GeneratorExit: of the model",
    "own": "Own: of the model",
    "surrogate": "RuntimeError: no file caf?.bin",
}


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the server. It has a module for models, and a folder `1`, which is none of the model's."""
    place = tmp_path / "place"
    (place / "1").mkdir(parents=True)
    (place / "1" / "model.py").write_text("raise RuntimeError('another model')")
    (place / "from_the_working_directory.py").write_text("GREETING = ' here'")
    monkeypatch.chdir(place)
    return place


def hostile(*, decoupled: bool = False) -> str:
    return f"DECOUPLED = {decoupled}\n{HOSTILE}"


async def said(model: ClassicModel, word: str) -> str:
    """The model's answer, or the error's text."""
    x = np.empty((1, 1), np.object_)
    x[0, 0] = word.encode()
    try:
        if model.takes_infer:
            response: InferResponse = await model.infer(request(X=x))
        else:
            [response] = [each async for each in model.stream(request(X=x))]
            if response.error is not None:
                raise response.error
    except PenstockError as error:
        return error.message
    return str(outputs(response)["Y"].ravel()[0].decode())


@pytest.mark.usefixtures("working_directory")
async def test_whatever_a_model_raises_fails_one_request(tmp_path: Path) -> None:
    async with loaded(tmp_path, hostile(), CONFIG) as model:
        pid = str(instances(model)[0].pid)
        for before in ("", "await ", "task "):
            words = [f"{before}{how}" for how in WAYS]
            found = await asyncio.gather(*(said(model, word) for word in ["", *words, ""]))
            prefix = "Failed to process the request(s) for model 'm_0_0', message: "
            assert found == [pid, *(prefix + text for text in WAYS.values()), pid]
        assert await asyncio.gather(said(model, ""), said(model, "text")) == [pid, "SystemExit: no text"]
        assert await said(model, "stop") == pid
        assert await said(model, "await stop") == pid, "the loop runs again"
    assert Path("finalized").exists(), "the process was not killed"


@pytest.mark.usefixtures("working_directory")
async def test_whatever_a_decoupled_model_raises_fails_one_request(tmp_path: Path) -> None:
    async with loaded(tmp_path, hostile(decoupled=True), DECOUPLED) as model:
        pid = str(instances(model)[0].pid)
        for before in ("", "await ", "task "):
            for how, text in WAYS.items():
                assert (await said(model, before + how)).endswith(f", message: {text}")
                assert await said(model, "await") == pid


@pytest.mark.usefixtures("working_directory")
async def test_what_a_model_finds_around_itself_and_says_of_itself(tmp_path: Path) -> None:
    async with loaded(tmp_path, hostile(), CONFIG) as model:
        assert model.ready
        assert not reports_ready(model), "from the first moment"
        assert await said(model, "argv") == "['']"
        assert await said(model, "path") == "'' here"


@pytest.mark.usefixtures("working_directory")
async def test_only_the_server_ends_it(tmp_path: Path) -> None:
    """A signal to all processes of a service leaves running requests whole, and ends what a model ends by it."""
    begun = tmp_path / "begun"
    async with loaded(tmp_path, hostile(), CONFIG) as model:
        [instance] = instances(model)
        call = asyncio.create_task(said(model, str(begun)))
        await until(begun.exists)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.killpg(instance.pid, number)
        begun.unlink()
        assert await call == str(instance.pid)
        assert await said(model, "children") == repr([-signal.SIGTERM, -signal.SIGTERM])


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("import", "exit"),
        ("import", "own"),
        ("construction", "cancelled"),
        ("initialize", "keyboard"),
        ("initialize", "generator"),
        ("initialize", "surrogate"),
    ],
)
async def test_whatever_a_model_raises_while_it_loads_is_the_reason(tmp_path: Path, where: str, how: str) -> None:
    with pytest.raises(EngineError) as caught:
        async with loaded(tmp_path, leaving(where, how), CONFIG):
            pass
    assert caught.value.message.startswith(f"{WAYS[how]} (line ")


@pytest.mark.parametrize(
    ("where", "how"), [("import", "exit"), ("auto_complete_config", "keyboard"), ("auto_complete_config", "surrogate")]
)
def test_whatever_a_model_raises_while_it_completes_is_the_reason(tmp_path: Path, where: str, how: str) -> None:
    with pytest.raises(ValueError, match="line ") as caught:
        PythonBackend({}).auto_complete(parsed(""), write_model(tmp_path, leaving(where, how)))
    assert str(caught.value).startswith(f"{WAYS[how]} (line ")


def leaving(where: str, how: str) -> str:
    """A model that raises there."""
    head = HOSTILE.partition("async def leave_later")[0].replace("from from_the_working_directory", "from os")
    method = {"construction": "__init__", "import": "execute"}.get(where, where)
    now = f"leave({how!r})\n" if where == "import" else ""
    return f"""{head.replace("GREETING", "getcwd")}
{now}
class TritonPythonModel:
    execute = None
    def {method}(*_): leave({how!r})
"""
