"""`OpenVINORunner`: the model runner on OpenVINO."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import openvino as ov

from penstock.engines.contract.loading import Report, silent
from penstock.engines.contract.messages import ImageInput
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ImageRows
from penstock.engines.errors import UnsupportedError
from penstock.engines.host.memory import available_memory
from penstock.engines.kit.adapter_slots import WithAdapters, load_configured
from penstock.engines.kit.cache_size import StateSpace, num_blocks
from penstock.engines.kit.step_runner import StepRunner
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.drafting import draft_model_of, load_drafts, open_drafts
from penstock.engines.openvino.image_encoder import open_with_images
from penstock.engines.openvino.loading import load_decoder
from penstock.engines.openvino.lora import OpenVINOAdapters
from penstock.engines.openvino.process_memory import collapse_filled_memory
from penstock.kvcache import KVGroup

_COLLAPSE_SECONDS = 3.0
"""May be spent on huge pages at any rate; a model that takes longer to load may take as long again."""

_SHARE_OF_FREE_MEMORY = 0.5
"""Of what is free once the weights are loaded: the rest is for activations, logits and other processes."""


_OLDEST = (2026, 4)
"""Of OpenVINO; what attention is given is what this release takes."""


class OpenVINORunner(StepRunner, WithAdapters[OpenVINOAdapters]):
    """A `ModelRunner`. Loading raises UnsupportedError for a model that it cannot run, EngineError for a broken one."""

    def __init__(self, config: OpenVINOConfig, report: Report = silent) -> None:
        _check_release()
        started = time.monotonic()
        head = open_drafts(config, report)
        source, images = open_with_images(config, head.tap if head else None, report)
        if source.is_hybrid:
            check_hybrid(config)
        loaded = load_decoder(config, source, report)
        draft = load_drafts(config, head, loaded, report)
        collapse_filled_memory(max(_COLLAPSE_SECONDS, time.monotonic() - started))
        self._adapters = loaded.adapters
        kv_groups = tuple(KVGroup(loaded.block_size, group.window) for group in source.groups)
        block_bytes = loaded.block_bytes + (draft.block_bytes if draft else 0)
        free = available_memory() - self._adapters.reserved_bytes - (images.reserved_bytes if images else 0)
        space = StateSpace.of(config, loaded.state_interval, loaded.row_bytes, free)
        count = num_blocks(
            config,
            kv_groups,
            source.model_len,
            block_bytes + space.bytes_beside(loaded.block_size),
            free=free,
            beside=space.working_bytes,
            share=_SHARE_OF_FREE_MEMORY,
        )
        states = space.group(count, loaded.block_size)
        load_configured(config.adapters, self._adapters.prepare, self._adapters.install)
        loaded.use_blocks(count, states.num_rows + space.guess_rows if states else 0)
        words = loaded.words
        if draft:
            words += f", {head.words if head else f'draft model of {draft.source.num_layers} layers'}"
        info = ModelInfo(
            vocab_size=source.vocab_size,
            max_model_len=source.model_len,
            kv_groups=kv_groups,
            states=states,
            num_blocks=count,
            guess_states=space.guess_rows,
            eos_token_ids=source.eos_token_ids,
            runner=words,
            numerics=source.numerics.words,
            supports_pooling=True,
            supports_drafts=True,
            has_draft_model=draft is not None,
            supports_grammars=True,
            supports_processors=True,
            image_grid=None if images is None else images.grid,
            has_grid_positions=source.images is not None and source.images.has_grid_positions,
            whole_tiles=images is not None and images.whole_tiles,
            work=loaded.work,
        )
        draft_model = draft_model_of(draft, head, loaded, count, config.max_num_batched_tokens) if draft else None
        super().__init__(loaded.model, info, config.max_num_seqs, config.model_dir, draft_model)
        self._decoders = [loaded] if draft is None else [loaded, draft]
        self._images = images

    def encode_image(self, image: ImageInput, is_over: Callable[[], bool] = lambda: False) -> ImageRows | None:
        """`ImageHost.encode_image`"""
        assert self._images is not None
        return self._images.encode(image, is_over)

    @property
    def block_bytes(self) -> int:
        return self._decoders[0].model.cache.block_bytes

    @property
    def row_parts(self) -> int:
        return self._decoders[0].model.cache.row_parts

    def cache_identity(self) -> str:
        return self._decoders[0].cache_identity()

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self._decoders[0].model.cache.read_blocks(block_ids)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._decoders[0].model.cache.write_blocks(block_ids, contents)

    def close(self) -> None:
        """Frees the weights and the cache; the runner cannot be used afterwards."""
        super().close()
        for name in ("_model", "_draft_model", "_table", "_adapters", "_images"):
            delattr(self, name)
        for decoder in self._decoders:
            decoder.free()


def check_hybrid(config: OpenVINOConfig) -> None:
    """Raises UnsupportedError for settings that a model with recurrent layers does not go with."""
    if config.activations == "mixed":
        raise UnsupportedError(
            "activations=mixed cannot be combined with recurrent layers, whose states have one type",
            param="activations",
        )


def _check_release() -> None:
    """Raises UnsupportedError where another package's pins have brought an older OpenVINO."""
    release = ov.__version__.partition("-")[0]
    if tuple(int(number) for number in release.split(".")[:2]) < _OLDEST:
        raise UnsupportedError(f"OpenVINO {release} is too old: at least {'.'.join(map(str, _OLDEST))} is needed")
