"""The layout that everything else rests on: rooms, who may import whom, and what must never be imported at all."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.engines
from penstock.engines import __version__

ROOT = Path(__file__).parents[2]
PACKAGES = {"engines": {"engines", "classic"}, "loadtest": {"loadtest", "planning"}}
"""Of rooms that hold more than one."""
MAY_IMPORT = {
    "gateway": {"gateway", "engines", "classic", "kvcache", "tokenizers"},
    "engines": {"engines", "classic", "kvcache", "tokenizers"},
    "kvcache": {"kvcache"},
    "tokenizers": {"tokenizers"},
}
NEEDS_TORCH = (
    "loadtest/benchmarks/architectures/",
    "engines/penstock/classic/pytorch/program/",
    "engines/penstock/engines/tensorrt_llm/",
    "engines/penstock/engines/torch/",
    "engines/penstock/engines/vllm/",
    "gateway/penstock/gateway/backends/",
    "gateway/penstock/gateway/commands/verify/reference.py",
)
"""Runners and backends that are made of it, and what compares with it."""


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def penstock_packages(path: Path) -> set[str]:
    """Packages of ours that it imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("penstock.")}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Modules that are imported anywhere, with the names taken from them: "a.b" and "a.b.c" for `from a.b import c`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # a relative one starts in the module's package: room/penstock/room/...
            package = path.relative_to(ROOT).parts[1 : -node.level] if node.level else ()
            module = ".".join((*package, *filter(None, [node.module])))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@functools.cache
def imported(path: Path) -> set[str]:
    return set(imports(path))


def test_the_rooms_are_here() -> None:
    for room in MAY_IMPORT:
        assert sources(room), f"{room} has no source"


@pytest.mark.parametrize("room", [*MAY_IMPORT, "loadtest"])
def test_penstock_is_one_namespace(room: str) -> None:
    assert not (ROOT / room / "__init__.py").exists(), "a top-level package would shadow others, tokenizers for one"
    has_module = (ROOT / room / "penstock" / "__init__.py").exists()
    assert has_module == (room == "gateway"), "one of them says what `penstock` is, and finds the other rooms"
    folders = {path.name for path in (ROOT / room / "penstock").iterdir() if path.is_dir()}
    packages = folders - {"__pycache__"}
    assert packages == PACKAGES.get(room, {room})


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_only_what_they_may(room: str) -> None:
    for path in sources(room):
        ours = penstock_packages(path)
        assert ours <= MAY_IMPORT[room], f"{name_of(path)} imports {ours - MAY_IMPORT[room]}"


def test_the_contract_is_a_leaf() -> None:
    """What scheduler, runners and gateway say to each other imports none of them."""
    for path in sources("engines/penstock/engines/contract"):
        ours = {name for name in imported(path) if name.startswith("penstock.")}
        leaf = ("penstock.engines.contract", "penstock.engines.errors", "penstock.kvcache")
        assert all(name.startswith(leaf) for name in ours), f"{name_of(path)} imports {ours}"
        assert "asyncio" not in imported(path)


ROOMS = {"apis", "commands", "models", "processes", "server", "transports"}
"""Of the gateway: folders of packages."""
LAYERS = (
    {"database", "errors", "commands.terminal_chat", "commands.top"},
    {"configuration"},
    {"server.debug_bundle", "requests", "transports.http2"},
    {"transports.sockets", "transports.stream_driver"},
    {"transports.http", "metrics"},
    {"transports.grpc", "models.memory", "apis.usage"},
    {"models.on_demand"},
    {"apis.kserve"},
    {"models.language", "models.repository", "processes.model_host"},
    {"models.pooling"},
    {"models.entries"},
    {"models.catalogue"},
    {"models.language.dataplane", "models.repository.known_models"},
    {"models.repository.manager", "models.language.adapter_control", "models.language.kserve", "models.pooling.plane"},
    {"commands.bench", "generating"},
    {"apis.pooling", "models.upstream"},
    {"apis.anthropic", "apis.openai", "models.loader", "models.traffic"},
    {"commands.offline", "apis.ollama", "apis.responses"},
    {"apis.batches", "commands.doctor", "commands.verify"},
    {"apis.operator_views", "server.ports"},
    {"apis.console", "processes.fronts"},
    {"server.composition"},
    {"server.signals"},
    {"server.front_ports", "server.open_ports"},
    {"server.served_models"},
    {"server.front_server", "server.lifecycle"},
    {"ray_serve"},
    {"cli"},
)
"""Of the gateway's packages and modules: each imports only those above it, and itself. A module with a place of its own
is no part of its package here."""


def layer_of(module: str) -> str:
    """`apis.openai` of `apis.openai.chat`, `requests` of `requests.context`."""
    first, *rest = module.split(".")
    package = f"{first}.{rest[0]}" if first in ROOMS and rest else first
    own = ".".join((package, *rest[1:2]))
    return own if any(own in names for names in LAYERS) else package


def test_the_gateway_s_packages_have_no_cycles() -> None:
    """Transport, what all protocols share, and the protocols."""
    base = ROOT / "gateway" / "penstock" / "gateway"
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    for path in sources("gateway/penstock/gateway"):
        own = layer_of(".".join(path.relative_to(base).with_suffix("").parts))
        for name in imported(path):
            theirs = layer_of(name.removeprefix("penstock.gateway."))
            if name.startswith("penstock.gateway.") and own in level and theirs in level:
                assert theirs == own or level[theirs] < level[own], f"{name_of(path)} imports {name}"


def test_every_package_of_the_gateway_has_its_place() -> None:
    base = ROOT / "gateway" / "penstock" / "gateway"
    known = {name for names in LAYERS for name in names} | {f"{room}.__init__" for room in ROOMS} | {"__init__"}
    for path in sources("gateway/penstock/gateway"):
        assert layer_of(".".join(path.relative_to(base).with_suffix("").parts)) in known, name_of(path)


def test_language_models_and_classic_models_know_little_of_each_other() -> None:
    """Of the other package: errors, and what the machine has."""
    for path in sources("engines/penstock/classic"):
        theirs = {name for name in imported(path) if name.startswith("penstock.engines")}
        allowed = ("penstock.engines.errors", "penstock.engines.host")
        assert all(name == "penstock.engines" or name.startswith(allowed) for name in theirs), name_of(path)
    for path in sources("engines/penstock/engines"):
        assert not [name for name in imported(path) if name.startswith("penstock.classic")], name_of(path)


def test_load_tests_know_servers_only_by_their_protocols() -> None:
    for path in sources("loadtest/penstock/loadtest"):
        ours = penstock_packages(path)
        assert ours <= {"loadtest"}, f"{name_of(path)} imports {ours - {'loadtest'}}"


def test_plans_run_the_engine_s_books_and_no_server() -> None:
    """What is planned is what runs: scheduler, KV cache and routing, under a load test's workloads."""
    for path in sources("loadtest/penstock/planning"):
        ours = penstock_packages(path)
        assert ours <= {"planning", "loadtest", "engines", "kvcache"}, name_of(path)
        assert not {name.split(".")[0] for name in imported(path)} & {"asyncio", "threading"}, name_of(path)


def test_the_wheel_has_the_rooms_without_the_benchmarks() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["packages"]) == {f"{room}/penstock" for room in (*MAY_IMPORT, "loadtest")}
    for path in sources(*(f"{room}/penstock" for room in (*MAY_IMPORT, "loadtest"))):
        assert not [name for name in imported(path) if name.split(".")[0] == "benchmarks"], name_of(path)


def test_the_peers_benchmark_knows_servers_only_by_their_protocols() -> None:
    """Others are measured alike; the micro benchmarks alone import what they time."""
    assert sources("loadtest/benchmarks/peers")
    for path in sources("loadtest/benchmarks/peers"):
        assert penstock_packages(path) <= {"loadtest"}, name_of(path)


def test_books_are_kept_without_concurrency() -> None:
    forbidden = {"threading", "asyncio", "multiprocessing", "concurrent", "queue", "_thread", "time", "socket", "zmq"}
    for path in sources("kvcache", "engines/penstock/engines/scheduler"):
        found = {name.split(".")[0] for name in imported(path)} & forbidden
        assert not found, f"{name_of(path)} imports {found}"
        asynchronous = [n for n in ast.walk(tree(path)) if isinstance(n, ast.AsyncFunctionDef | ast.Await)]
        assert not asynchronous, f"{name_of(path)} awaits"


def test_nothing_unpickles() -> None:
    """Unpickling what came from outside runs it."""
    modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    attributes = {"recv_pyobj", "send_pyobj"}
    for path in sources(*MAY_IMPORT, "loadtest"):
        found = {name.split(".")[0] for name in imported(path)} & modules
        nodes = list(ast.walk(tree(path)))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        tensors_only = {call.func for call in calls if "weights_only=True" in map(ast.unparse, call.keywords)}
        for node in nodes:
            if (
                isinstance(node, ast.Attribute)
                and node not in tensors_only
                and (node.attr in attributes or ast.unparse(node) in ("torch.load", "numpy.load", "np.load"))
            ):
                found.add(ast.unparse(node))
        assert not found, f"{name_of(path)} uses {found}"


def test_only_runners_that_are_made_of_torch_import_it() -> None:
    for path in sources(*MAY_IMPORT, "loadtest"):
        if not name_of(path).startswith(NEEDS_TORCH):
            found = {name.split(".")[0] for name in imported(path)} & {"torch", "transformers", "vllm", "tensorrt_llm"}
            assert not found, f"{name_of(path)} imports {found}"


def test_runners_do_not_know_sampling() -> None:
    """They hand logits over, and the kit chooses tokens. vLLM chooses them itself."""
    knowing = {
        path.parent.name
        for path in sources("engines/penstock/engines")
        if any(name.startswith("penstock.engines.kit.sampling") for name in imports(path))
    }
    assert knowing == {"kit", "sampling", "vllm"}


def test_only_one_package_knows_ray() -> None:
    """And the command line reaches it without: Ray is loaded when something is deployed."""
    for path in sources(*MAY_IMPORT, "loadtest"):
        if not name_of(path).startswith("gateway/penstock/gateway/ray_serve/"):
            assert "ray" not in {name.split(".")[0] for name in imported(path)}, name_of(path)


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hugging_faces_tokenizers_is_found_from_the_repository() -> None:
    assert "site-packages" in run_python(
        "import tokenizers; from tokenizers import Tokenizer; print(tokenizers.__file__)"
    )


@pytest.mark.parametrize(
    "module", ["penstock.engines.process.worker", "penstock.engines.process.client", "penstock.gateway.cli"]
)
def test_starting_up_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'tensorflow', 'jax'}} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_penstock_alone_loads_nothing() -> None:
    names = "sorted(name for name in sys.modules if name.partition('.')[0] in ('penstock', 'numpy', 'asyncio'))"
    assert run_python(f"import sys, penstock; print({names})") == "['penstock']"


def test_penstock_has_its_llm_and_all_rooms() -> None:
    """Also where only the rooms' folders are on the path."""
    rooms = [str(ROOT / room) for room in (*MAY_IMPORT, "loadtest")]
    for order in (rooms, rooms[::-1]):
        code = (
            f"import sys; sys.path[:0] = {order}; import penstock; from penstock import LLM;"
            "import penstock.kvcache, penstock.tokenizers, penstock.loadtest, penstock.classic.base;"
            "print(penstock.LLM is LLM, hasattr(penstock, 'LLMs'), penstock.__version__)"
        )
        assert run_python(code) == f"True False {__version__}"


def test_the_version_stands_in_one_place() -> None:
    """It holds in a source tree that is not installed, and the distribution called `penstock` is another project's."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert about["project"]["name"] == "penstock-server"
    assert (ROOT / about["tool"]["hatch"]["version"]["path"]).samefile(str(penstock.engines.__file__))
    for path in sources(*MAY_IMPORT, "loadtest"):
        texts = [ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        assert not [text for text in texts if text.endswith(("version('penstock')", "distribution('penstock')"))], path


def test_a_gateway_loads_no_openvino() -> None:
    """The engine's process does: it would take the gateway most of a second to start, and memory."""
    assert run_python("import sys, penstock.gateway.server.lifecycle; print('openvino' in sys.modules)") == "False"


def test_an_engine_process_of_simulated_models_loads_no_openvino() -> None:
    code = (
        "import sys, penstock.engines.process.worker; from penstock.engines.registry import EngineSpec, load_runner;"
        "load_runner(EngineSpec(runner='simulated')); print('openvino' in sys.modules)"
    )
    assert run_python(code) == "False"


_WITH_TRITONS_NAMES = "engines/penstock/classic/python/worker/"
"""A program of its own, in the process of a Python model."""


def test_no_two_classes_of_the_server_have_one_name() -> None:
    """A name is to be understood where it is read, without its folder."""
    places: dict[str, list[str]] = {}
    for room in ("gateway", "engines", "kvcache", "tokenizers"):
        for path in sources(room):
            if name_of(path).startswith(_WITH_TRITONS_NAMES):
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(name_of(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
