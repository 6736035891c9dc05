"""LoRA adapters that come and go while vLLM runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError
from penstock.engines.kit.adapter_slots import AdapterSlots, load_configured
from penstock.engines.vllm.adapter_files import check_adapter
from penstock.engines.vllm.config import VLLMConfig

logger = logging.getLogger(__name__)


class VLLMAdapters:
    """Those that vLLM's workers have, by key. Never more than there are slots, so that vLLM never swaps them."""

    def __init__(self, executor: Any, config: VLLMConfig) -> None:
        """Loads the configured ones. Raises what `prepare` and `install` raise."""
        self._executor = executor
        self._model_dir = config.model_dir
        self._slots = AdapterSlots[LoRARequest](config.adapter_slots)
        self._max_rank = config.max_lora_rank
        load_configured(config.adapters, self.prepare, self.install)

    def prepare(self, key: str, folder: Path) -> Path:
        """As `AdapterHost.prepare_adapter`: checks the files, which vLLM's workers read themselves. UnsupportedError
        where the engine was started without slots."""
        self._slots.check_free(key)
        check_adapter(folder, self._model_dir, self._max_rank)
        return folder.absolute()

    def install(self, key: str, folder: Path) -> None:
        """As `AdapterHost.install_adapter`. Takes as long as vLLM's workers need to read the files."""
        self._slots.check_free(key)
        request = LoRARequest(key, self._slots.new_number(), str(folder))  # workers may remember old numbers
        try:
            self._executor.add_lora(request)
        except Exception as e:
            # which of vLLM's checks found it is not said by the exceptions' kinds; half of it may be in a slot
            logger.debug("vLLM refuses the adapter %s", key, exc_info=True)
            self._executor.remove_lora(request.lora_int_id)
            raise InvalidRequestError(f"vLLM cannot load the adapter: {e}") from e
        self._slots.hold(key, request)

    def unload(self, key: str) -> None:
        request = self._slots.held.pop(key, None)
        if request is not None:
            self._executor.remove_lora(request.lora_int_id)

    def __getitem__(self, key: str) -> LoRARequest | None:
        """None for the base model, whose key is empty. Raises ModelNotFoundError for a key that is not loaded."""
        if not key:
            return None
        request = self._slots.held.get(key)
        if request is None:
            raise ModelNotFoundError(f"no LoRA adapter is loaded as {key!r}", param="model")
        return request
