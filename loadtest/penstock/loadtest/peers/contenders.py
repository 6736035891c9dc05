"""Who takes part: the peers, and Penstock in the forms that they are compared with."""

from __future__ import annotations

from importlib.util import find_spec

import msgspec

from penstock.loadtest.peers import launch
from penstock.loadtest.peers.catalog import PEERS
from penstock.loadtest.peers.launch import Start, penstock


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    environment: str = ""
    """Of which peer; empty: the one that this command runs in."""
    start: Start | None = None
    """None: OpenVINO GenAI, which is no server."""
    modules: tuple[str, ...] = ()
    """That must be here."""

    @property
    def lacking(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


def _peer(name: str, start: Start | None) -> Contender:
    return Contender(name=name, title=PEERS[name].title, environment=name, start=start)


_LANGUAGE = (
    *("{model}", "--served-model-name", "m", "--no-prefix-caching", "--max-model-len", str(2 * launch.SEQUENCE)),
    *("--max-num-seqs", "{places}"),
)
_SIMULATED = ("--engine", "simulated", "--served-model-name", "m", "--max-num-seqs", "{places}")
_ALL = (
    _peer("openvino", None),
    _peer("vllm", launch.vllm),
    _peer("transformers", launch.transformers),
    _peer("llamacpp", launch.llamacpp),
    _peer("triton", launch.triton),
    _peer("mlserver", launch.mlserver),
    _peer("kserve", launch.kserve),
    _peer("litserve", launch.litserve),
    Contender(name="starlette", title="uvicorn and starlette alone", start=launch.bare("plain")),
    Contender(name="sse-starlette", title="uvicorn and sse-starlette alone", start=launch.bare("events")),
    Contender(
        name="penstock",
        title="Penstock, openvino",
        start=penstock("", *_LANGUAGE, "--engine", "openvino", "--threads", "{threads}", "--kv-cache-memory", "{kv}"),
    ),
    Contender(
        name="penstock-vllm",
        title="Penstock, vllm",
        environment="vllm",
        start=penstock(
            "vllm", *_LANGUAGE, "--engine", "vllm", "--threads", "{engine_threads}", "--kv-cache-memory", "{kv}"
        ),
    ),
    Contender(
        name="penstock-torch",
        title="Penstock, torch",
        environment="transformers",
        start=penstock(
            "transformers", *_LANGUAGE, "--engine", "torch", "--threads", "{threads}", "--kv-cache-memory", "{kv}"
        ),
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
    Contender(name="penstock-stream", title="Penstock, simulated", start=penstock("", *_SIMULATED)),
    Contender(
        name="penstock-each",
        title="Penstock, simulated, each step by itself",
        start=penstock("", *_SIMULATED, "--stream-interval-ms", "0"),
    ),
)
CONTENDERS = {contender.name: contender for contender in _ALL}
