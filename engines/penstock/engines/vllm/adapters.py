"""LoRA adapters that come and go while vLLM runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.engines.formats.adapter_files import WEIGHTS_FILE, read_settings
from penstock.engines.formats.model_settings import text_name
from penstock.engines.formats.safetensors_file import Shape, read_header
from penstock.engines.kit.adapter_slots import AdapterSlots, load_configured
from penstock.engines.vllm.config import VLLMConfig

logger = logging.getLogger(__name__)

_PART = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


def check_adapter(folder: Path, model_dir: Path, max_rank: int) -> None:
    """Raises InvalidRequestError unless the files are there and their shapes fit the model's.

    vLLM copies an adapter's matrices into larger buffers, so that one for a smaller model would be taken in silence.
    """
    read_settings(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise InvalidRequestError(f"the adapter has no {WEIGHTS_FILE}")
    try:
        parts = [(name, shape, match) for name, shape in _matrices(path) if (match := _PART.fullmatch(name))]
    except EngineError as e:
        raise InvalidRequestError(e.message) from e
    if not parts:
        raise InvalidRequestError(f"there is no matrix of an adapter in {WEIGHTS_FILE}")
    files = sorted(model_dir.glob("*.safetensors"))
    base = {_usual_name(name): shape for file in files for name, shape in _matrices(file)}
    for name, shape, match in parts:
        rank, width = shape if match["side"] == "A" else shape[::-1]
        if rank > max_rank:
            raise InvalidRequestError(f"{name} has rank {rank}, more than max_lora_rank={max_rank}")
        # A is [rank, in] and B [out, rank] beside a weight [out, in]; vLLM says whether it knows the module
        weight = base.get(_usual_name(match["module"] + ".weight"))
        if weight is not None and width != weight[match["side"] == "A"]:
            raise InvalidRequestError(f"{name} is {list(shape)}, which does not fit the model's {list(weight)}")


def _usual_name(name: str) -> str:
    """Whole models that also take images, and adapters for them, name the language model's tensors in several ways."""
    return text_name(name) or name


def _matrices(path: Path) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the matrices in a safetensors file; packed weights have no true shape."""
    for name, described in read_header(path).items():
        if len(described.shape) == 2 and "F" in described.dtype:
            yield name, described.shape


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
