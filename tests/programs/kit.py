"""What the scripts of programs share: a place to install into and to run in, servers to talk to, and the two steps."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripted import Call, ScriptedModel, scripted

from support.server import Server, serving

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "gateway/penstock/gateway/demo_model"
KEY = "dummy-key"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
)
"""A picture of one point."""
LOCAL = "local"
"""The demo model, as its server offers it to agents."""
_CONTEXT = 65536
_REFUSED = re.compile(r"ACCESS +\w+ \S+ [45]\d\d ")


class ProgramFailed(Exception):
    pass


class Place:
    """A folder for one program: what is installed for it, its home, and one to work in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)

    def npm(self, *packages: str) -> None:
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(self._folder / "npm")]
        subprocess.run([*install, *packages], check=True)

    def pip(self, *packages: str) -> None:
        """With uv, which the variable UV names: pip would take minutes for some of them."""
        subprocess.run([sys.executable, "-m", "venv", str(self._folder / "venv")], check=True)
        install = [os.environ["UV"], "pip", "install", "-q", "-p", str(self._folder / "venv/bin/python")]
        subprocess.run([*install, *packages], check=True)

    def environ(self, **more: str) -> dict[str, str]:
        """No variable of the caller's but where programs are."""
        path = f"{self._folder}/venv/bin:{self._folder}/npm/node_modules/.bin:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb"} | more

    def run(self, *command: str, **environ: str) -> str:
        """The program's output. It works in `work` and has to succeed."""
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self.environ(**environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ProgramFailed(f"exit status {done.returncode} of {command[0]}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def node(self, script: str, **environ: str) -> str:
        """Runs a script of this folder, beside the packages that it imports."""
        copied = shutil.copy(HERE / script, self._folder / "npm")
        return self.run("node", str(copied), **environ)


def check(holds: bool, about: str, seen: object = "") -> None:
    if not holds:
        raise ProgramFailed(f"not so: {about}\n{seen}")


@contextmanager
def server(*flags: str, may_refuse: str = "$^") -> Iterator[Server]:
    """Penstock, which may refuse nothing but what the pattern finds in its access log."""
    with serving(*flags, "--kv-cache-memory", "512MiB", environ={}) as running:
        try:
            yield running
        except ProgramFailed as error:
            raise ProgramFailed("\n".join([str(error), "the server's log:", *whole_log(running)])) from None
        log = whole_log(running)
        refused = [line for line in log if _REFUSED.search(line) and not re.search(may_refuse, line)]
        check(not refused, "every request is answered", "\n".join(refused))


def whole_log(running: Server) -> list[str]:
    running.stop()
    running.wait_for_log("<end>")
    return running.log


@contextmanager
def agent_server(place: Place, answer: str, *calls: Call) -> Iterator[tuple[Server, ScriptedModel]]:
    """A server with two models: one that follows a script, and the demo model behind a strict chat template."""
    local = (str(_long_demo(place.home / "long-demo")), "--served-model-name", LOCAL)
    template = ("--chat-template", str(HERE / "strict.jinja"))
    with scripted(answer, *calls) as model, server(*local, *template, "--upstream", model.flag) as running:
        yield running, model


def _long_demo(folder: Path) -> Path:
    """The demo model with room for an agent's prompt. Its answers to one make no sense, so many tokens end them."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO / name)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _CONTEXT}))
    ends = [config["eos_token_id"], *range(300, config["vocab_size"], 50)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def main(name: str, install: Callable[[Place], None], converse: Callable[[Place], Iterator[str]]) -> None:
    """`python SCRIPT install FOLDER`, then `converse`, which prints a line that says what works."""
    step, folder = sys.argv[1:]
    if step == "install":
        install(Place(Path(folder)))
        return
    try:
        print(f"{name}: {'; '.join(converse(Place(Path(folder))))}")
    except ProgramFailed as error:
        sys.exit(f"{name}: {error}")
