"""The plan of what is measured: groups of servers that take turns, and the cases that each of them goes through."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.peers.catalog import PEERS
from benchmarks.peers.settings import PeersSettings
from benchmarks.peers.shapes import SHAPES

TENSORS = {
    "add_sub": ("INPUT0:FP32:1,16", "INPUT1:FP32:1,16"),
    "identity": ("INPUT0:FP32:1,3,224,224",),
}
"""Models of the tensor tables, and what is sent to them."""
_HTTP, _BINARY, _GRPC = "kserve-http", "kserve-http-binary", "kserve-grpc"
PROTOCOLS = {_HTTP: "JSON", _BINARY: "binary", _GRPC: "gRPC"}
"""Of the tensor tables, by the name that readers know."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    table: str
    model: str
    protocol: str
    concurrency: int
    sampled: bool = False
    """With temperature 0.7 and top_p 0.9 (generation); otherwise greedy."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All are started, and measured in turns: what the machine does otherwise meets all of them alike."""

    table: str
    contenders: tuple[str, ...]
    """The first is what the others are compared with."""
    cases: tuple[Case, ...]
    model: str = ""
    """That the servers are started with (generation)."""
    weights: str = "native"
    """What its weights are stored in."""

    @property
    def peer(self) -> str:
        return self.contenders[0]

    @property
    def peers(self) -> list[str]:
        return [name for name in self.contenders if name in PEERS]

    @property
    def pinned(self) -> bool:
        """Servers on the first core and clients on the others; a language model gets all there is."""
        return not self.model


_GENERATION = {
    "openvino": ("penstock",),
    "vllm": ("penstock-vllm", "penstock-vllm-engine", "penstock"),
    "transformers": ("penstock-torch", "penstock"),
    "llamacpp": ("penstock",),
}
"""Penstock with the same engine and as many threads, where it has it (vLLM's under either scheduler), and with its own
choice for CPUs."""
QUANTIZED = {
    "openvino": {"int8": "optimum-intel's int8", "int4": "optimum-intel's int4"},
    "vllm": {"int8": "W8A8 of compressed-tensors"},
    "llamacpp": {"int8": "Q8_0", "int4": "Q4_K_M"},
}
"""Forms of a model with weights in 8 and 4 bits that peers have: they are compared with Penstock's own choice."""
_SERVED = {
    "triton": ((_HTTP, _BINARY, _GRPC), ("penstock-python", "penstock-onnx")),
    "mlserver": ((_HTTP, _GRPC), ("penstock-python",)),
    "kserve": ((_HTTP, _BINARY, _GRPC), ("penstock-python",)),
    "litserve": ((_HTTP,), ("penstock-python",)),
}
"""Protocols that the peer offers."""

_STREAMS = {
    "paced": ("starlette-paced", "sse-starlette-paced", "penstock-paced"),
    "streaming": ("starlette", "sse-starlette", "penstock-stream"),
}
"""What takes part in the tables without a model."""


HISTORY, TURNS, TURN_TOKENS = 8000, 20, 200
"""An agent's session: tokens before its first turn, turns, and what each adds: its question and the answer before."""
ORDERED = ("turns", "images")
"""Tables whose requests differ by their order: the first one finds nothing that is kept."""
PICTURE = (1024, 768)
"""Pixels of an image."""
_TURNS = {"llamacpp": ("penstock",)}
_IMAGES = {"llamacpp": ("penstock",)}
"""Peers that are servers, read prompts again where they ended, and read images."""
IMAGE_REQUESTS = 2
"""In a run: with a new picture, and the same again."""


def requests_of(case: Case, settings: PeersSettings) -> int:
    """In a run of the generation tables."""
    if case.table in ORDERED:
        return TURNS if case.table == "turns" else IMAGE_REQUESTS
    shape = SHAPES[case.model]
    return max(settings.waves * shape.waves * case.concurrency, shape.least_requests)


def plan(settings: PeersSettings) -> list[Group]:
    """In the order of the catalog: quick tables first."""
    groups: list[Group] = []
    chosen = settings.only or tuple(PEERS)
    if not settings.only:
        groups += [_streams(table, settings) for table in _STREAMS if table in settings.tables]
    if "tensors" in settings.tables:
        groups += [_tensors(peer, settings) for peer in _SERVED if peer in chosen]
    if "generation" in settings.tables and settings.together:
        groups += [
            _together(chosen, model, weights, settings) for model in settings.models for weights in settings.weights
        ]
    elif "generation" in settings.tables:
        for model in sorted(settings.models, key=list(SHAPES).index):
            groups += [
                _generation(peer, model, weights, settings)
                for weights in settings.weights
                for peer in _GENERATION
                if peer in chosen and (weights == "native" or weights in QUANTIZED.get(peer, {}))
            ]
    for table, peers in zip(ORDERED, (_TURNS, _IMAGES), strict=True):
        if table in settings.tables:
            groups += [
                _chats(table, (peer, *_pipelines(model, chosen), *ours), model, weights)
                for model in settings.models
                for weights in settings.weights
                for peer, ours in peers.items()
                if peer in chosen and (SHAPES[model].vision is not None) == (table == "images")
            ]
    return groups


def _pipelines(model: str, chosen: Sequence[str]) -> list[str]:
    """OpenVINO GenAI, for the images that it knows."""
    vision = SHAPES[model].vision
    return ["openvino"] if vision is not None and vision.has_genai and "openvino" in chosen else []


def _chats(table: str, contenders: tuple[str, ...], model: str, weights: str) -> Group:
    case = Case(table=table, model=model, protocol="openai-chat", concurrency=1)
    return Group(table=table, contenders=contenders, cases=(case,), model=model, weights=weights)


def _streams(table: str, settings: PeersSettings) -> Group:
    cases = [
        Case(table=table, model="m", protocol="openai-completions", concurrency=streams) for streams in settings.streams
    ]
    return Group(table=table, contenders=_STREAMS[table], cases=tuple(cases))


def _tensors(peer: str, settings: PeersSettings) -> Group:
    protocols, ours = _SERVED[peer]
    cases = [
        Case(table="tensors", model=model, protocol=protocol, concurrency=places)
        for model in settings.tensor_models
        for protocol in protocols
        for places in settings.in_flight
    ]
    return Group(table="tensors", contenders=(peer, *ours), cases=tuple(cases))


def _generation(peer: str, model: str, weights: str, settings: PeersSettings) -> Group:
    ours = _GENERATION[peer] if weights == "native" else ("penstock",)
    return _generating((peer, *ours), model, weights, settings)


def _together(peers: Sequence[str], model: str, weights: str, settings: PeersSettings) -> Group:
    able = [peer for peer in peers if peer in _GENERATION and (weights == "native" or weights in QUANTIZED[peer])]
    return _generating((*able, "penstock"), model, weights, settings)


def _generating(contenders: tuple[str, ...], model: str, weights: str, settings: PeersSettings) -> Group:
    cases = [
        Case(table="generation", model=model, protocol="openai-completions", concurrency=places, sampled=sampled)
        for sampled, counts in ((False, settings.concurrency), (True, settings.sampled))
        for places in counts
    ]
    return Group(table="generation", contenders=contenders, cases=tuple(cases), model=model, weights=weights)
