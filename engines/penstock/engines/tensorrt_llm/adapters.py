"""LoRA adapters: TensorRT-LLM loads one when the first request names it, and swaps them by itself."""

from __future__ import annotations

from pathlib import Path

from tensorrt_llm.executor.request import LoRARequest

from penstock.engines.errors import ModelNotFoundError, UnsupportedError
from penstock.engines.formats.adapter_files import read_adapter
from penstock.engines.kit.adapter_slots import AdapterSlots, load_configured
from penstock.engines.tensorrt_llm.arguments import TARGET_MODULES
from penstock.engines.tensorrt_llm.config import TensorRTLLMConfig


class TensorRTLLMAdapters:
    """Those that requests may name, by key."""

    def __init__(self, config: TensorRTLLMConfig) -> None:
        """Takes in the configured ones. Raises what `prepare` raises."""
        self._slots = AdapterSlots[LoRARequest](config.max_loras)
        self._max_rank = config.max_lora_rank
        load_configured(config.adapters, self.prepare, self.install)

    def prepare(self, key: str, folder: Path) -> Path:
        """As `AdapterHost.prepare_adapter`; UnsupportedError where the engine was started without slots."""
        self._slots.check_free(key)
        check_adapter(folder, self._max_rank)
        return folder.absolute()

    def install(self, key: str, folder: Path) -> None:
        """As `AdapterHost.install_adapter`."""
        number = self._slots.new_number()  # part of the prefix cache's key in TensorRT-LLM
        self._slots.hold(key, LoRARequest(lora_name=key, lora_int_id=number, lora_path=str(folder)))

    def unload(self, key: str) -> None:
        self._slots.held.pop(key, None)

    def __getitem__(self, key: str) -> LoRARequest | None:
        """None for the base model, whose key is empty. Raises ModelNotFoundError for a key that is not loaded."""
        if not key:
            return None
        try:
            return self._slots.held[key]
        except KeyError:
            raise ModelNotFoundError(f"no LoRA adapter {key!r} is loaded", param="model") from None


def check_adapter(folder: Path, max_rank: int) -> None:
    """Raises InvalidRequestError or UnsupportedError for what TensorRT-LLM would refuse only when a request names it,
    or would apply in part: it reads one rank and one scaling for all layers."""
    layers = read_adapter(folder, max_rank)
    foreign = {path.rpartition(".")[2] for path in layers} - TARGET_MODULES.keys()
    if foreign:
        named, possible = ", ".join(sorted(foreign)), ", ".join(TARGET_MODULES)
        raise UnsupportedError(f"the adapter changes {named}; with TensorRT-LLM it may change {possible}")
    if len({(layer.a.shape[0], layer.scaling) for layer in layers.values()}) > 1:
        raise UnsupportedError("the adapter's layers differ in rank or scaling, which TensorRT-LLM does not support")
