"""The contenders: the peers, and Penstock in the forms that they are compared with."""

from __future__ import annotations

from importlib.util import find_spec

import msgspec

from benchmarks.peers import launch
from benchmarks.peers.catalog import PEERS
from benchmarks.peers.launch import Start, penstock
from benchmarks.peers.plan import QUANTIZED


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    environment: str = ""
    """Of which peer; empty: the one that this command runs in."""
    start: Start | None = None
    """None: OpenVINO GenAI, which is no server."""
    modules: tuple[str, ...] = ()
    """That must be here."""
    engine: str = ""
    """Of the generation tables: what it computes in, and with how many threads, which are filled in."""

    def computing(self, weights: str) -> str:
        """The same for weights in this form."""
        if weights == "native":
            return self.engine
        own = QUANTIZED.get(self.name, {}).get(weights, weights)
        return f"weights in {own}; {{threads}}"

    @property
    def lacking(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


def _peer(name: str, start: Start | None, engine: str = "") -> Contender:
    return Contender(name=name, title=PEERS[name].title, environment=name, start=start, engine=engine)


_BF16 = "bf16, keys and values too"
_NATIVE = f"{_BF16} (f32 on a CPU without bf16)"
_LANGUAGE = (
    *("{model}", "--served-model-name", "m", "{prefix_caching}", "--max-model-len", "{length}"),
    *("--max-num-seqs", "{places}", "--max-num-batched-tokens", str(launch.STEP_TOKENS)),
)
_WHOLE_STEPS = ("--itl-target-ms", "0")
"""For Penstock's scheduler, which otherwise gives prompts less of a step where steps take long."""
_ALL_THREADS = (*_LANGUAGE, *_WHOLE_STEPS, "--threads", "{threads}", "--kv-cache-memory", "{kv}")
_VLLM = (*_LANGUAGE, "--engine", "vllm", "--threads", "{engine_threads}", "--kv-cache-memory", "{kv}")
PACE_MS = 20
"""From token to token of a paced stream: long enough that no server sends two of them together."""
_SIMULATED = ("--engine", "simulated", "--served-model-name", "m", "--max-num-seqs", "{places}")
_ALL = (
    _peer("openvino", None, f"{_NATIVE}, weights from fp16; {{threads}}"),
    _peer("vllm", launch.vllm, f"{_BF16}; {{engine_threads}}"),
    _peer("transformers", launch.transformers, f"{_BF16}; {{threads}}"),
    _peer("llamacpp", launch.llamacpp, "bf16, keys and values in f16; {threads}"),
    _peer("triton", launch.triton),
    _peer("mlserver", launch.mlserver),
    _peer("kserve", launch.kserve),
    _peer("litserve", launch.litserve),
    Contender(name="starlette", title="uvicorn and starlette alone", start=launch.bare("plain")),
    Contender(name="sse-starlette", title="uvicorn and sse-starlette alone", start=launch.bare("events")),
    Contender(
        name="penstock",
        title="Penstock, openvino",
        start=penstock("", *_ALL_THREADS, "--engine", "openvino", "--weights", "{weights}"),
        engine=f"{_NATIVE}; {{threads}}",
    ),
    Contender(
        name="penstock-vllm",
        title="Penstock, vllm",
        environment="vllm",
        start=penstock("vllm", *_VLLM, *_WHOLE_STEPS),
        engine=f"{_BF16}; {{engine_threads}}",
    ),
    Contender(
        name="penstock-vllm-engine",
        title="Penstock, vllm with its own scheduler",
        environment="vllm",
        start=penstock("vllm", *_VLLM, "--scheduler", "engine"),
        engine=f"{_BF16}; {{engine_threads}}",
    ),
    Contender(
        name="penstock-torch",
        title="Penstock, torch",
        environment="transformers",
        start=penstock("transformers", *_ALL_THREADS, "--engine", "torch"),
        engine=f"{_BF16}; {{threads}}",
    ),
    Contender(
        name="penstock-python",
        title="Penstock, python",
        start=penstock("", "--model-repository", "{repositories}/triton"),
    ),
    Contender(
        name="penstock-onnx",
        title="Penstock, onnxruntime",
        start=penstock("", "--model-repository", "{repositories}/onnx"),
        modules=("onnx", "onnxruntime"),
    ),
    Contender(
        name="starlette-paced",
        title="uvicorn and starlette alone",
        start=launch.bare("plain", PACE_MS),
    ),
    Contender(
        name="sse-starlette-paced",
        title="uvicorn and sse-starlette alone",
        start=launch.bare("events", PACE_MS),
    ),
    Contender(name="penstock-stream", title="Penstock, simulated", start=penstock("", *_SIMULATED)),
    Contender(
        name="penstock-paced",
        title="Penstock, simulated",
        start=penstock("", *_SIMULATED, "--stream-interval-ms", "0", "--sim-step-ms", str(PACE_MS)),
    ),
)
CONTENDERS = {contender.name: contender for contender in _ALL}
