"""The launch of each server: its command and environment, and how it is spoken to."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.peers.peers_folder import FOREIGN, PeersFolder
from benchmarks.peers.process import Ports
from benchmarks.peers.recipes import MMPROJ, W8A8, gguf_form, openvino_form, triton_environment
from benchmarks.peers.shapes import SHAPES

SEQUENCE = 1024
"""Tokens that a server must have room for in each place of a batch, at least."""
STEP_TOKENS = 2048
"""Of prompts and answers, at most in one step of an engine: what one more of them costs others is each server's choice,
and throughput depends on it. OpenVINO GenAI's stands in its program."""
KV_GIB = 2
"""Memory for keys and values, where a server takes a number."""
_ADDRESS = "127.0.0.1"


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is started with."""

    peers_folder: PeersFolder
    model: str
    """Of the generation tables; empty for the others."""
    weights: str = "native"
    """What its weights are stored in."""
    cores: tuple[int, ...]
    """That the server may use."""
    places: int
    """Most requests at a time."""
    sequence: int = SEQUENCE
    """Tokens that each of them may have."""
    reuse: bool = False
    """Prompts are kept, and read again where they go on."""
    timeout: float

    @property
    def engine_cores(self) -> tuple[int, ...]:
        """For OpenMP's threads, which spin: the first core is left to the server around them, if there are two."""
        return self.cores[1:] or self.cores

    @property
    def folder(self) -> Path:
        return self.peers_folder.model(self.model)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    argv: Sequence[str | Path]
    env: dict[str, str] = {}
    ready: str = "/health"
    """Path that answers 200 when the server is ready."""
    model: str = "m"
    """By which it knows the model of the generation tables."""
    extra: str = '{"temperature": 0}'
    """Merged into each request for generation."""
    sampled_extra: str = '{"temperature": 0.7, "top_p": 0.9}'
    """The same for those that are sampled."""
    ignore_eos: bool = True
    end_mark: bool = True


Start = Callable[[Surroundings, Ports], Launch]
Argv = list[str | Path]


def vllm(at: Surroundings, ports: Ports) -> Launch:
    """Eager where there is no compiler for its graph. With small weights it gets all cores, as the engine that it is
    compared with then. Log lines for each request are off."""
    cores = at.engine_cores if at.weights == "native" else at.cores
    limits = ["--max-model-len", str(2 * at.sequence), "--max-num-seqs", str(at.places), "--dtype", "bfloat16"]
    limits += ["--max-num-batched-tokens", str(STEP_TOKENS)]
    switches = [*([] if shutil.which("g++") else ["--enforce-eager"]), "--no-enable-prefix-caching"]
    switches.append("--no-enable-log-requests")
    name = ["--served-model-name", "m", "--disable-uvicorn-access-log"]
    program: Argv = [
        at.peers_folder.program("vllm", "vllm"),
        "serve",
        at.folder if at.weights == "native" else at.peers_folder.converted(at.model, W8A8),
        "--host",
        _ADDRESS,
        "--port",
        str(ports.http),
    ]
    env = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Launch(argv=[*program, *limits, *switches, *name], env=env)


def llamacpp(at: Surroundings, ports: Ports) -> Launch:
    """Each slot has a cache of its own. Unless prompts are to be kept, which its defaults do (with checkpoints of
    recurrent states), neither they nor idle slots are; log lines for each request are off."""
    threads = str(len(at.cores))
    weights: Argv = [
        "--model",
        at.peers_folder.converted(at.model, gguf_form(at.weights)),
        "--host",
        _ADDRESS,
        "--port",
        str(ports.http),
    ]
    slots = ["--parallel", str(at.places), "--ctx-size", str(at.places * at.sequence)]
    work = ["--threads", threads, "--threads-batch", threads, "--batch-size", str(STEP_TOKENS), "--ubatch-size", "512"]
    if SHAPES[at.model].vision is not None:
        weights += ["--mmproj", at.peers_folder.converted(at.model, MMPROJ)]
    without = ["--log-verbosity", "2", *([] if at.reuse else ["--no-cache-prompt", "--cache-ram", "0"])]
    return Launch(
        argv=[at.peers_folder.llama_server, *weights, *slots, *work, *without],
        sampled_extra='{"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0}',  # it truncates by default
    )


def transformers(at: Surroundings, ports: Ports) -> Launch:
    """It refuses fields that it does not know, and takes EOS from a generation configuration within the request."""
    program: Argv = [
        at.peers_folder.program("transformers", "transformers"),
        "serve",
        at.folder,
        "--continuous-batching",
    ]
    where = ["--host", _ADDRESS, "--port", str(ports.http), "--device", "cpu", "--dtype", "bfloat16"]
    blocks = ["--cb-block-size", "32", "--cb-num-blocks", str(at.places * at.sequence // 32)]
    batch = ["--cb-max-batch-tokens", str(STEP_TOKENS), "--no-cb-use-cuda-graph", "--attn-implementation", "sdpa"]
    return Launch(
        argv=[*program, *where, *blocks, *batch],
        env={"OMP_NUM_THREADS": str(len(at.cores))},
        model=str(at.folder),
        extra='{"generation_config": "{\\"eos_token_id\\": -1, \\"do_sample\\": false}", "stream_options": null}',
        sampled_extra='{"generation_config": "{\\"eos_token_id\\": -1, \\"do_sample\\": true, \\"temperature\\": 0.7, '
        '\\"top_p\\": 0.9, \\"top_k\\": 0}", "stream_options": null}',
        ignore_eos=False,
        end_mark=False,
    )


def triton(at: Surroundings, ports: Ports) -> Launch:
    program = at.peers_folder.packages("triton") / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    kinds = zip(("http", "grpc", "metrics"), ports, strict=True)
    where = [flag for kind, port in kinds for flag in (f"--{kind}-address={_ADDRESS}", f"--{kind}-port={port}")]
    models = [
        f"--model-repository={at.peers_folder.repository('triton')}",
        f"--backend-directory={at.peers_folder.backends}",
    ]
    argv: Argv = [program, *models, *where, "--allow-gpu-metrics=false"]
    return Launch(argv=argv, env=triton_environment(at.peers_folder), ready="/v2/health/ready")


def mlserver(at: Surroundings, ports: Ports) -> Launch:
    """One process: its workers would each run models of their own."""
    env = {
        "PYTHONPATH": str(FOREIGN),
        "MLSERVER_HOST": _ADDRESS,
        "MLSERVER_HTTP_PORT": str(ports.http),
        "MLSERVER_GRPC_PORT": str(ports.grpc),
        "MLSERVER_METRICS_PORT": str(ports.metrics),
        "MLSERVER_PARALLEL_WORKERS": "0",
        "MLSERVER_DEBUG": "false",
    }
    argv: Argv = [at.peers_folder.program("mlserver", "mlserver"), "start", at.peers_folder.repository("mlserver")]
    return Launch(argv=argv, env=env, ready="/v2/health/ready")


def kserve(at: Surroundings, ports: Ports) -> Launch:
    program: Argv = [at.peers_folder.program("kserve"), FOREIGN / "kserve_server.py", "--enable_grpc", "true"]
    where = ["--http_port", str(ports.http), "--grpc_port", str(ports.grpc)]
    return Launch(argv=[*program, *where], ready="/v2/health/ready")


def litserve(at: Surroundings, ports: Ports) -> Launch:
    return Launch(argv=[at.peers_folder.program("litserve"), FOREIGN / "litserve_server.py", str(ports.http)])


def bare(style: str, step_ms: int = 0) -> Start:
    """starlette ships with Penstock, and uvicorn with its `[test]` extra: no environment of their own."""

    def start(at: Surroundings, ports: Ports) -> Launch:
        return Launch(argv=[sys.executable, FOREIGN / "bare_stream.py", str(ports.http), style, str(step_ms)])

    return start


def penstock(environment: str, *flags: str) -> Start:
    """Penstock from a peer's environment, or from this one (empty); `{threads}` and the like are filled in."""

    def start(at: Surroundings, ports: Ports) -> Launch:
        python = at.peers_folder.program(environment) if environment else sys.executable
        kinds = zip(("http", "grpc", "metrics"), ports, strict=True)
        where = [flag for kind, port in kinds for flag in (f"--{kind}-port", str(port))]
        known = {
            "model": at.folder,
            "weights": "auto" if at.weights == "native" else at.weights,
            "threads": len(at.cores),
            "engine_threads": len(at.engine_cores),
            "places": at.places,
            "length": 2 * at.sequence,
            "prefix_caching": "--prefix-caching" if at.reuse else "--no-prefix-caching",
            "kv": f"{KV_GIB}GiB",
            "repositories": at.peers_folder.root / "repositories",
        }
        filled = [flag.format_map(known) for flag in flags]
        argv: Argv = [python, "-m", "penstock.gateway.cli", "serve", *filled, *where]
        return Launch(argv=argv, ready="/health/ready")

    return start


def genai(at: Surroundings) -> Argv:
    """No server: a program with its own way in. For images it keeps prompts, and takes one request at a time."""
    model = at.peers_folder.converted(at.model, openvino_form(at.weights))
    python, threads = at.peers_folder.program("openvino"), str(len(at.cores))
    if SHAPES[at.model].vision is not None:
        return [python, FOREIGN / "genai_images.py", model, threads]
    return [python, FOREIGN / "genai_load.py", model, threads, str(at.places)]


def all_cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))
