"""LoRA adapters: TensorRT-LLM loads one when the first request names it, and swaps them by itself."""

from __future__ import annotations

from pathlib import Path

from tensorrt_llm.executor.request import LoRARequest

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, OverloadedError, UnsupportedError
from penstock.engines.formats.adapter_files import read_adapter
from penstock.engines.tensorrt_llm.arguments import TARGET_MODULES
from penstock.engines.tensorrt_llm.config import TensorRTLLMConfig


class TensorRTLLMAdapters:
    """Those that requests may name, by key."""

    def __init__(self, config: TensorRTLLMConfig) -> None:
        """Takes in the configured ones. Raises what `prepare` raises."""
        self._slots = config.max_loras
        self._max_rank = config.max_lora_rank
        self._loaded: dict[str, LoRARequest] = {}
        self._num_ids = 0
        for key, folder in config.adapters.items():
            self.install(key, self.prepare(key, folder))

    def prepare(self, key: str, folder: Path) -> Path:
        """As `AdapterHost.prepare_adapter`; UnsupportedError where the engine was started without slots."""
        self._check_free(key)
        check_adapter(folder, self._max_rank)
        return folder.absolute()

    def install(self, key: str, folder: Path) -> None:
        """As `AdapterHost.install_adapter`."""
        self._check_free(key)
        self._num_ids += 1  # part of the prefix cache's key in TensorRT-LLM: none is used twice
        self._loaded[key] = LoRARequest(lora_name=key, lora_int_id=self._num_ids, lora_path=str(folder))

    def _check_free(self, key: str) -> None:
        if not self._slots:
            raise UnsupportedError("this model was loaded without LoRA: --lora or --lora-directory", param="lora")
        if key in self._loaded:
            raise InvalidRequestError(f"adapter {key} is loaded already")
        if len(self._loaded) >= self._slots:
            raise OverloadedError(f"all {self._slots} adapter slots are taken (--max-loras)")

    def unload(self, key: str) -> None:
        self._loaded.pop(key, None)

    def __getitem__(self, key: str) -> LoRARequest | None:
        """None for the base model, whose key is empty. Raises ModelNotFoundError for a key that is not loaded."""
        if not key:
            return None
        try:
            return self._loaded[key]
        except KeyError:
            raise ModelNotFoundError(f"no LoRA adapter {key!r} is loaded", param="model") from None


def check_adapter(folder: Path, max_rank: int) -> None:
    """Raises InvalidRequestError or UnsupportedError for what TensorRT-LLM would refuse only when a request names it,
    or would apply in part: it reads one rank and one scaling for all layers."""
    layers = read_adapter(folder, max_rank)
    foreign = {path.rpartition(".")[2] for path in layers} - TARGET_MODULES.keys()
    if foreign:
        found, possible = ", ".join(sorted(foreign)), ", ".join(TARGET_MODULES)
        raise UnsupportedError(f"the adapter changes {found}; with TensorRT-LLM it may change {possible}")
    if len({(layer.a.shape[0], layer.scaling) for layer in layers.values()}) > 1:
        raise UnsupportedError("the adapter's layers differ in rank or scaling, which TensorRT-LLM does not support")
