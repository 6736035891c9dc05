"""The counting program: what the next reader opens.

`python tests/locality/count.py [FOLDER]` starts a server from the checkout in FOLDER (this one by default) under a
line tracer, sends each kind of request several times, and prints the files and lines that ran for it in every process;
then, of the source, files, lines and public names per package, and the packages that each one imports, names of
TYPE_CHECKING blocks included. `--json` prints the lists instead.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from support.inside import Inside  # noqa: E402

ROOMS = ("gateway", "engines", "kvcache", "tokenizers", "loadtest")
DEMO = "gateway/penstock/gateway/demo_model"
STEP = "penstock/engines/core.py:step"
IDLE_SECONDS = 3
REPEATS = 8
"""Times that each request is sent: lines that run less often than this belong to something else."""

ADD_SUB = """\
name: "add_sub" backend: "python" max_batch_size: 0
input [{ name: "A" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "B" data_type: TYPE_FP32 dims: [ 4 ] }]
"""
ADD_SUB_MODEL = """\
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "A").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("B", tensor + tensor)]) for tensor in tensors]
"""
CHAT = {
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 24,
    "temperature": 0,
    "stream": True,
}
INFER = {"inputs": [{"name": "A", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}

Lines = dict[str, dict[int, int]]
"""File -> line -> how often it ran."""


@dataclass(frozen=True)
class Scenario:
    """One kind of request; `inside` counts only what runs inside of the engine's step."""

    name: str
    send: Callable[[TracedServer], None]
    inside: bool = False


class TracedServer:
    """`penstock serve` of a checkout, with the tracer in each of its processes."""

    def __init__(self, checkout: Path, folder: Path, inside: Inside) -> None:
        self.inside = inside
        self.idle: dict[str, set[int]] = {}
        model = folder / "models/add_sub"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(ADD_SUB)
        (model / "1/model.py").write_text(ADD_SUB_MODEL)
        rooms = (str(checkout / room) for room in ROOMS)
        path = [inside.environ["PYTHONPATH"], *rooms, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = {**os.environ, **inside.environ, "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-m", "penstock.gateway.cli", "serve", str(checkout / DEMO)]
        flags = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", f"--model-repository={folder}/models"]
        self._process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env=environ, cwd=folder)
        self.http, self.grpc = self._ports()

    def _ports(self) -> tuple[str, str]:
        assert self._process.stderr is not None
        ports = None
        log = []
        for line in self._process.stderr:
            log.append(line)
            if match := re.search(r"listening on https?://\S+:(\d+) \(gRPC (\d+)", line):
                ports = f"http://127.0.0.1:{match[1]}", f"127.0.0.1:{match[2]}"
            if "ready: " in line and ports:
                return ports
        raise SystemExit("the server did not start:\n" + "".join(log))

    @cached_property
    def model(self) -> str:
        """The language model's name. Asked for once: it is no part of what is traced."""
        with urllib.request.urlopen(self.http + "/v1/models", timeout=60) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def note_idle(self, checkout: Path) -> None:
        """Notes what runs without a request."""
        self.inside.command(b"c")
        time.sleep(IDLE_SECONDS)
        self.idle = {file: set(lines) for file, lines in ran_lines(self, "all", checkout).items()}

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        request = urllib.request.Request(
            self.http + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


def send_chat(server: TracedServer) -> None:
    assert b"[DONE]" in server.post("/v1/chat/completions", {"model": server.model, **CHAT})


def send_infer(server: TracedServer) -> None:
    server.post("/v2/models/add_sub/infer", INFER)


def send_stream_infer(server: TracedServer) -> None:
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    text = b"Say something."
    tensors = [
        service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[1])
        for name, datatype in (("text_input", "BYTES"), ("stream", "BOOL"))
    ]
    request = service_pb2.ModelInferRequest(
        model_name=server.model,
        inputs=tensors,
        raw_input_contents=[len(text).to_bytes(4, "little") + text, b"\1"],
        parameters={"max_tokens": service_pb2.InferParameter(int64_param=24)},
    )
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = list(stub.ModelStreamInfer(iter([request]), timeout=60))
    assert len(responses) > 1, responses
    assert not responses[0].error_message, responses[0].error_message


SCENARIOS = (
    Scenario("streamed chat", send_chat),
    Scenario("ModelStreamInfer of a language model", send_stream_infer),
    Scenario("KServe infer of a Python model", send_infer),
    Scenario("engine step (OpenVINO)", send_chat, inside=True),
)


def traced(server: TracedServer, scenario: Scenario, checkout: Path) -> dict[str, list[int]]:
    """File -> lines that ran at least once for each request, in any process. Files of which nothing ran that does not
    run on an idle server, too, belong to its health checks."""
    for _ in range(2):
        scenario.send(server)
    server.inside.command(b"c")
    for _ in range(REPEATS):
        scenario.send(server)
    counts = ran_lines(server, "inside" if scenario.inside else "all", checkout)
    ran = {file: sorted(line for line, count in lines.items() if count >= REPEATS) for file, lines in counts.items()}
    idle = {} if scenario.inside else server.idle
    return {file: lines for file, lines in sorted(ran.items()) if lines and not idle.get(file, set()).issuperset(lines)}


def ran_lines(server: TracedServer, where: str, checkout: Path) -> dict[str, Counter[int]]:
    """File -> line -> how often it ran in any process since the last `c`."""
    counts: dict[str, Counter[int]] = {}
    for answer in server.inside.command(b"r"):
        for file, lines in answer[where].items():
            name = os.path.relpath(file, checkout)
            counts.setdefault(name, Counter()).update({int(line): count for line, count in lines.items()})
    return counts


def traced_rows(files: dict[str, list[int]], checkout: Path) -> tuple[int, int, int, int]:
    """Files, those of the gateway, lines that ran, lines that these files have."""
    whole = sum(len((checkout / file).read_text().splitlines()) for file in files)
    return len(files), sum(f.startswith("gateway/") for f in files), sum(map(len, files.values())), whole


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name, its lines, its public names, and the modules of ours that it imports."""

    name: str
    lines: int
    names: int
    imports: frozenset[str]

    @property
    def package(self) -> str:
        """`penstock.gateway.requests`; a module that stands in a room by itself keeps its name."""
        return ".".join(self.name.split(".")[:3])


def modules(checkout: Path) -> list[Module]:
    paths = {dotted(path, checkout / room): path for room in ROOMS for path in (checkout / room).rglob("*.py")}
    return [read_module(name, path, paths) for name, path in sorted(paths.items())]


def dotted(path: Path, room: Path) -> str:
    return ".".join(path.relative_to(room).with_suffix("").parts).removesuffix(".__init__")


def read_module(name: str, path: Path, known: dict[str, Path]) -> Module:
    text = path.read_text()
    tree = ast.parse(text)
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [node for node in tree.body if isinstance(node, defined) and not node.name.startswith("_")]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = {module for target in imports(tree, package) if (module := nearest(target, known)) and module != name}
    return Module(name, len(text.splitlines()), len(public), frozenset(imported))


def imports(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def nearest(target: str, known: dict[str, Path]) -> str | None:
    """The module that an imported name lies in."""
    while target and target not in known:
        target = target.rpartition(".")[0]
    return target or None


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of more than one name that reach each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(edges.get(name, ())):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in sorted(edges):
        if name not in index:
            visit(name)
    return groups


def print_sources(checkout: Path) -> None:
    found = modules(checkout)
    packages: dict[str, list[Module]] = {}
    for module in found:
        packages.setdefault(module.package, []).append(module)
    print("| package | files | lines | public names | imports |\n|---|---|---|---|---|")
    for package, members in packages.items():
        targets = {".".join(t.split(".")[:3]) for m in members for t in m.imports} - {package}
        used = " ".join(sorted(t.removeprefix("penstock.") for t in targets))
        lines, names = sum(m.lines for m in members), sum(m.names for m in members)
        print(f"| {package.removeprefix('penstock.')} | {len(members)} | {lines} | {names} | {used} |")
    small = sum(m.lines <= 75 for m in found)
    print(f"\n{len(found)} files ({small} of at most 75 lines), {sum(m.lines for m in found)} lines,", end=" ")
    print(f"{sum(m.names for m in found)} public names")
    groups = cycles({m.name: set(m.imports) for m in found})
    print(f"{len(groups)} import cycles" + "".join(f"\n- {', '.join(group)}" for group in groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=HERE.parents[1])
    parser.add_argument("--json", action="store_true", help="print the lines of each scenario as JSON")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    tracer = HERE / "line_tracer.py"
    with tempfile.TemporaryDirectory() as folder, Inside(Path(folder), tracer, LOCALITY_INSIDE=STEP) as inside:
        server = TracedServer(checkout, Path(folder), inside)
        try:
            server.note_idle(checkout)
            results = {scenario.name: traced(server, scenario, checkout) for scenario in SCENARIOS}
        finally:
            server.close()
    if arguments.json:
        print(json.dumps(results))
        return
    print("| what runs | files | of the gateway | lines that ran | lines of these files |\n|---|---|---|---|---|")
    for name, files in results.items():
        print("|", " | ".join(map(str, (name, *traced_rows(files, checkout)))), "|")
    print()
    print_sources(checkout)


if __name__ == "__main__":
    main()
