"""The engines under test, each with an oracle that knows what greedy decoding must give.

To put another engine under the suite, add a `Candidate` here: how to load its runner, and the tokens to expect.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from penstock.engines.contract.continuous_batcher import ContinuousBatcher
from penstock.engines.contract.loading import silent
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.registry import BATCHERS, EngineSpec, load_runner
from penstock.engines.simulated import (
    OwnThread,
    SimulatedBatcher,
    SimulatedBatcherConfig,
    SimulatedConfig,
    SimulatedRunner,
)
from penstock.engines.torch.config import TorchConfig
from penstock.engines.torch.runner import TorchRunner
from penstock.kvcache import KVGroup, StateGroup
from support.adapters import save_adapter
from support.conformance import Oracle, close_drivers, with_an_image
from support.engine import is_runner
from support.images import make_seeing_model, reference_tokens_with_images
from support.models import (
    FAMILIES,
    load_reference,
    make_adapter,
    make_model,
    merge_adapter,
    reference_hidden,
    reference_tokens,
)
from support.simulated import generate, vector

MakeAdapter = Callable[[str], tuple[Path, Oracle]]

BLOCK = 32
"""Tokens of a block, in every engine."""
NUM_BLOCKS = 24
POOLS = {"mistral": 10, "gemma3": 36}
"""Blocks of models that need fewer of them for a request, or several tables: as scarce as elsewhere."""
LAYERS = {
    "gemma3": ["sliding_attention", "full_attention", "sliding_attention"],
    "lfm2": ["conv", "full_attention", "conv"],
    "qwen3.5": ["linear_attention", "full_attention", "linear_attention"],
}
"""Of models whose layers are of several kinds; the others have two. Deeper ones are in tests/unit/engines."""
MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Candidate:
    """`engine` has NUM_BLOCKS blocks, or as `POOLS` says."""

    engine: ModelRunner | ContinuousBatcher
    expect: Oracle
    vector: Callable[[Sequence[int]], list[float]]
    """What a pooling request should give, not normalized."""
    tolerance: float = 1e-4
    """By which numbers of vectors may differ."""
    forget: Callable[[], object] = lambda: None
    """Empties the prefix cache of an engine that has one of its own."""
    whole_block_hits: bool = False
    """A prefix hit ends at a block's border, also when the whole prompt is cached."""
    attached: bool = False
    """The tests reach it through a door, with an AttachedEngine."""
    sees: bool = False
    """Its prompts have images (`with_an_image`)."""
    adapter: MakeAdapter | None = None
    """Of an engine with room for two LoRA adapters: makes one that will be loaded under this key, the folder and what
    it gives. Keys are of the form NAME:NUMBER; adapters of one name are the same."""

    def hit(self, num_tokens: int) -> int:
        """How many of so many cached tokens of a prompt a little longer are found: whole blocks. With
        recurrent layers a checkpoint is there."""
        return num_tokens // BLOCK * BLOCK

    @property
    def ends_hits_at_borders(self) -> bool:
        return self.whole_block_hits or self.engine.info.states is not None

    def read(self, prompt: Sequence[int]) -> Sequence[int]:
        """What becomes of it."""
        return with_an_image(prompt)[0] if self.sees else prompt

    @property
    def abilities(self) -> dict[str, bool]:
        """What not every engine has."""
        engine, info = self.engine, self.engine.info
        runner = is_runner(engine)
        return {
            "our scheduler": runner,
            "steps in flight": is_runner(engine) and engine.max_steps_in_flight > 1,
            "drafts": runner and info.supports_drafts,
            "forced tokens": runner and (info.supports_drafts or info.states is not None),
            "vectors": runner and info.supports_pooling,
            "grammars": info.supports_grammars,
            "logprobs": info.supports_logprobs,
            "LoRA adapters": self.adapter is not None,
            "windows": runner and any(group.window for group in info.kv_groups),
        }

    def needs(self, *abilities: str) -> None:
        """Skips the test where the engine lacks one of them."""
        found = self.abilities
        for ability in abilities:
            if not found[ability]:
                pytest.skip(f"not of this engine: {ability}")


def _simulated(own_scheduler: bool = False, own_thread: bool = False, **options: Any) -> Callable[[Path], Candidate]:
    """Its oracle is the definition of its digests."""
    sizes = {
        "vocab_size": 384,
        "num_blocks": NUM_BLOCKS,
        "block_size": 32,
        "max_model_len": MAX_MODEL_LEN,
        "max_loras": 2,
        **options,
    }

    def load(folder: Path) -> Candidate:
        runner = SimulatedRunner(SimulatedConfig(**sizes))
        first = sizes.get("first_token_id", 0)

        def oracle(adapter: str = "") -> Oracle:
            def expect(prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
                return generate(runner.info, prompt, count, first_token_id=first, adapter=adapter)

            return expect

        def make(key: str) -> tuple[Path, Oracle]:
            return save_adapter(folder / key), oracle(key)

        common: dict[str, Any] = {
            "expect": oracle(),
            "vector": lambda prompt: vector(runner.info, prompt),
            "tolerance": 0.0,
            "adapter": make,
        }
        if not own_scheduler:
            return Candidate(runner, **common)
        config = SimulatedBatcherConfig(**sizes, max_num_seqs=16, max_num_batched_tokens=256)
        batcher = SimulatedBatcher(config)
        forget = batcher._scheduler.kv.pool.clear_cache
        return Candidate(OwnThread(batcher) if own_thread else batcher, forget=forget, **common)

    return load


def _attached(load: Callable[[Path], Candidate]) -> Callable[[Path], Candidate]:
    """Its owner has the adapters."""
    return lambda folder: replace(load(folder), attached=True, adapter=None)


def _transformers(folder: Path) -> dict[str, Any]:
    """What transformers gives."""
    reference = load_reference(folder)
    return {"expect": _generate(reference), "vector": lambda prompt: reference_hidden(reference, prompt)}


def _generate(reference: PreTrainedModel) -> Oracle:
    known: dict[tuple[int, ...], list[int]] = {}

    def expect(prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        tokens = known.get(tuple(prompt), [])
        if len(tokens) < count:
            tokens = known[tuple(prompt)] = reference_tokens(reference, prompt, count, guess)
        return tokens[:count]

    return expect


def _with_weights(folder: Path) -> MakeAdapter:
    """Random adapters, each the same for each key of a name; merged into the weights for the oracle."""
    made: dict[str, tuple[Path, Oracle]] = {}

    def make(key: str) -> tuple[Path, Oracle]:
        name = key.partition(":")[0]
        if name not in made:
            reference = load_reference(folder)
            path = make_adapter(folder / name, reference, seed=len(made) + 1, rank=8 - 4 * (len(made) % 2))
            made[name] = path, _generate(merge_adapter(reference, path))
        return made[name]

    return make


def _make_model(folder: Path, family: str) -> None:
    layers = {"layer_types": LAYERS[family]} if family in LAYERS else {}
    make_model(folder, family, eos_token_id=None, num_hidden_layers=len(LAYERS.get(family, "..")), **layers)


def _openvino(family: str, adapters: bool = False) -> Callable[[Path], Candidate]:
    def load(folder: Path) -> Candidate:
        _make_model(folder, family)
        config = OpenVINOConfig(
            model_dir=folder,
            dtype="f32",
            weights="f32",
            kv_cache_dtype="f32",
            threads=1,
            num_blocks=POOLS.get(family, NUM_BLOCKS),
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_loras=2 if adapters else 0,
        )
        make = _with_weights(folder) if adapters else None
        return Candidate(OpenVINORunner(config), **_transformers(folder), adapter=make)

    return load


def _openvino_seeing(folder: Path) -> Candidate:
    reference = make_seeing_model(folder)

    def expect(prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        tokens, images, _ = with_an_image(prompt)
        if not images:
            return reference_tokens(reference, prompt, count, guess)
        return reference_tokens_with_images(reference, tokens, images, count, guess)

    config = OpenVINOConfig(
        folder, dtype="f32", weights="f32", kv_cache_dtype="f32", threads=1, num_blocks=NUM_BLOCKS, max_num_seqs=16
    )
    runner = OpenVINORunner(config)
    return Candidate(runner, expect, lambda prompt: reference_hidden(reference, prompt), sees=True)


def _torch(family: str) -> Callable[[Path], Candidate]:
    def load(folder: Path) -> Candidate:
        _make_model(folder, family)
        config = TorchConfig(
            model_dir=folder,
            dtype="f32",
            device="cpu",
            threads=1,
            block_size=32,
            num_blocks=POOLS.get(family, NUM_BLOCKS),
            max_num_seqs=16,
            max_loras=2,
        )
        return Candidate(TorchRunner(config), **_transformers(folder), adapter=_with_weights(folder))

    return load


def _vllm(
    family: str, own_scheduler: bool = False, adapters: bool = False, num_blocks: int = NUM_BLOCKS
) -> Callable[[Path], Candidate]:
    def load(folder: Path) -> Candidate:
        # its attention kernels for CPUs know heads of 32 and more
        make_model(folder, family, eos_token_id=None, hidden_size=128, head_dim=32)
        options = {
            "model_dir": folder,
            "dtype": "f32",
            "num_blocks": num_blocks,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "max_loras": 2 if adapters else 0,
        }
        oracles, make = _transformers(folder), _with_weights(folder) if adapters else None
        if own_scheduler:
            batcher: Any = BATCHERS["vllm"](options, silent)
            forget = batcher._core.reset_prefix_cache
            return Candidate(batcher, **oracles, forget=forget, whole_block_hits=True, adapter=make)
        return Candidate(load_runner(EngineSpec(runner="vllm", options=options)), **oracles, adapter=make)

    return load


ALIKE = ("llama-linear", "llama-llama3")
"""They differ from llama-yarn in a table of numbers alone, which tests/unit/engines/openvino compare with the
reference."""

CANDIDATES: dict[str, Callable[[Path], Candidate]] = {
    "simulated": _simulated(),
    "simulated-attached": _attached(_simulated()),
    "simulated-windows": _simulated(kv_groups=(KVGroup(32), KVGroup(16, 48))),
    "simulated-windows-alone": _simulated(kv_groups=(KVGroup(32, 40),), num_blocks=10),
    "simulated-states": _simulated(states=StateGroup(64, 40, 32)),
    "simulated-few-words": _simulated(first_token_id=381),
    "simulated-engine": _simulated(own_scheduler=True),
    "simulated-thread": _simulated(own_scheduler=True, own_thread=True),
    **{
        f"openvino-{family}": _openvino(family, adapters=family == "llama")
        for family in FAMILIES
        if family not in ALIKE
    },
    "openvino-smolvlm": _openvino_seeing,
    **{f"torch-{family}": _torch(family) for family in ("llama", "mistral", "gemma3", "qwen3.5")},
    **{f"vllm-{family}": _vllm(family) for family in ("llama", "qwen3")},
    "vllm-mistral": _vllm("mistral", num_blocks=10),
    "vllm-qwen2": _vllm("qwen2", adapters=True),
    "vllm-engine": _vllm("llama", own_scheduler=True, adapters=True),
}


VARIANTS = {
    f"{engine}-{family}" for engine in ("openvino", "torch", "vllm") for family in FAMILIES.keys() - {"llama", "gemma3"}
} - {"vllm-qwen2", "openvino-lfm2"} | {"torch-gemma3", "openvino-smolvlm"}
"""They differ from another candidate in the model alone: only tests marked `every_family` run on them. (vllm-qwen2 is
the one with adapters, openvino-gemma3 the one with several groups, openvino-lfm2 the one with recurrent layers.)"""

_FAMILIES = pytest.mark.families(
    "openvino-smolvlm", "torch-qwen3.5", "torch-gemma3", *(name for name in VARIANTS if name.startswith("vllm"))
)
"""Of VARIANTS, those that are always tried: that the others are for EVERY_FAMILY is said in tests/conftest.py."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "candidate" in metafunc.fixturenames:
        every = metafunc.definition.get_closest_marker("every_family") is not None
        names = [name for name in CANDIDATES if _is_there(name) and (every or name not in VARIANTS)]
        candidates = [pytest.param(name, marks=_FAMILIES if name in VARIANTS else ()) for name in names]
        metafunc.parametrize("candidate", candidates, indirect=True, scope="session")


def _is_there(candidate: str) -> bool:
    """vLLM has an environment of its own: .ci/vllm."""
    return not candidate.startswith("vllm") or importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _says_nothing_new(item)]


def _says_nothing_new(item: pytest.Item) -> bool:
    """A variant, with a value that the other candidates are enough for."""
    marker = item.get_closest_marker("every_family")
    if marker is None or not isinstance(item, pytest.Function):
        return False
    values = item.callspec.params
    return values["candidate"] in VARIANTS and any(values[name] not in some for name, some in marker.kwargs.items())


@pytest.fixture(scope="session")
def candidate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
    return CANDIDATES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def drivers_are_closed() -> Iterator[None]:
    yield
    close_drivers()
