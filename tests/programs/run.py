"""Runs the programs of this folder against Penstock, all or those that are named: `python run.py [--quick] [NAME ...]`.

Each gets a folder of its own and a time limit. It is installed with this machine's registries. Then it converses where
there is no network but the loopback interface, and no other process, if Linux lets us. What it starts ends with it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_INSTALLING = 400
_FOR_INSTALLING = ("PATH", "HOME", "UV")
_PREFIXES = ("PIP_", "UV_", "NPM_", "npm_", "SSL_", "NODE_EXTRA_CA_CERTS", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")


class Program(NamedTuple):
    script: str
    seconds: int
    """Most time of its conversation."""
    quick: bool = True


PROGRAMS = {
    "codex": Program("codex.py", 150),
    "claude-code": Program("claude_code.py", 150),
    "opencode": Program("opencode.py", 150),
    "vercel-ai": Program("vercel_ai.py", 60),
    "node-sdks": Program("node_sdks.py", 60),
    "aider": Program("aider.py", 150),
    "llm": Program("llm_cli.py", 60),
    "lm-eval": Program("harness.py", 200, quick=False),
    "guidellm": Program("guidellm_bench.py", 200, quick=False),
    "open-webui": Program("open_webui.py", 400, quick=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; none: all")
    parser.add_argument("--quick", action="store_true", help="those that take six minutes together")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - PROGRAMS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    names = arguments.names or [name for name in PROGRAMS if PROGRAMS[name].quick or not arguments.quick]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what runs
    alone = isolation()
    if not alone:
        print("no namespaces here: the programs see this machine's network", flush=True)
    failed = sum(not passes(PROGRAMS[name], alone) for name in names)
    print(f"{len(names) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


def isolation() -> list[str]:
    """What a command begins with to run with no network but its own loopback interface. Empty: that cannot be."""
    for user in ([], ["--map-root-user"]):
        command = ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *_LOOPBACK]
        try:
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return command
        except FileNotFoundError:
            break
    return []


def passes(program: Program, alone: list[str]) -> bool:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-program-") as folder:
        step = [sys.executable, str(HERE / program.script)]
        if not ended_well([*step, "install", folder], _INSTALLING):
            return False
        installed = time.monotonic()
        good = ended_well([*alone, *step, "converse", folder], program.seconds)
    ended = time.monotonic()
    print(f"  {installed - started:.0f} s to install, {ended - installed:.0f} s to converse", flush=True)
    return good


def ended_well(command: list[str], seconds: float) -> bool:
    """Runs it and ends all that it has started."""
    clean = {name: value for name, value in os.environ.items() if name in _FOR_INSTALLING or name.startswith(_PREFIXES)}
    environ = clean | {"PYTHONPATH": str(HERE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        print(f"{command[-3]}: not ended after {seconds} s", flush=True)
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
