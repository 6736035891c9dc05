"""The interface that our scheduler drives: steps in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import Grammar, ImageInput
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ImageRows, ModelRunnerOutput, SchedulerOutput


class ModelRunner(Protocol):
    """Computes steps in the order in which they are submitted. Owns the weights and the KV cache tensors; knows nothing
    of queues or clients."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps may be submitted and not yet collected, >= 1."""
        ...

    def submit(self, step: SchedulerOutput) -> None:
        """Accepts a step, and begins to compute it as soon as those before it are done. Returns at once wherever the
        device works without this thread."""
        ...

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step under way, starts the next one, and returns the oldest's result.

        An exception here or in `submit` means that the steps under way are lost; `reset` comes next.
        """
        ...

    def reset(self) -> None:
        """Forgets all requests and all steps under way, and returns when none of them can write to the KV cache any
        more. What the cache held before those steps stays there, except in rows of recurrent states that they were to
        write: the scheduler goes back to a checkpoint. If it raises, this process computes no more."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class GrammarHost(Protocol):
    """Also implemented by runners whose `info` says that they support grammars."""

    def compile_grammar(self, grammar: Grammar) -> Any:
        """What `NewRequest.grammar` is for requests with this grammar.

        Called on threads of their own while steps run: changes nothing that they use. Raises InvalidRequestError for
        what cannot be compiled, with the reason.
        """
        ...

    def is_worn_out(self, compiled: Any) -> bool:
        """Whether `compiled`, a result of `compile_grammar`, cannot be used for further requests."""
        ...


@runtime_checkable
class ImageHost(Protocol):
    """Also implemented by runners whose `info` has an `image_grid`."""

    def encode_image(self, image: ImageInput, is_over: Callable[[], bool]) -> ImageRows | None:
        """What the model reads in the image's place. None: `is_over` has become true, which is looked at a few times a
        second, and the rest was not computed.

        Called on one thread of its own while steps run: changes nothing that they use.
        """
        ...


@runtime_checkable
class BlockHost(Protocol):
    """Also implemented by runners whose KV cache blocks can be kept outside of it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's contents."""
        ...

    @property
    def row_parts(self) -> int:
        """As how many blocks a row of recurrent states is read and written; 0: the model has none. The parts of row r
        are the blocks `num_blocks + r * row_parts` and following."""
        ...

    def cache_identity(self) -> str:
        """Differs whenever the same tokens could give other contents: by model, weights, types, layout, versions."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Copies of their contents, [blocks, block_bytes]. Steps may be computed meanwhile, but none that writes to
        these blocks."""
        ...

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Writes contents that `read_blocks` gave, in this process or an earlier one with the same `cache_identity`.
        Called while steps may be computed that neither read nor write these blocks."""
        ...


@runtime_checkable
class AdapterHost(Protocol):
    """Also implemented by runners and batchers whose LoRA adapters can come and go at run time.

    Keys are unique among all adapters that an engine has ever had, since they divide the prefix cache: a name that is
    loaded again with other weights gets another key.
    """

    def prepare_adapter(self, key: str, folder: Path) -> Any:
        """Reads, checks and converts an adapter's files, for `install_adapter`. `folder` is in PEFT's format:
        adapter_config.json and safetensors.

        Called on a thread of its own while steps run: changes nothing that they use. Adapters are read one at a time,
        if reading does not hang: such a call is given up, and the next begins. Raises InvalidRequestError for files
        that do not fit the model, OverloadedError when there is no slot left.
        """
        ...

    def install_adapter(self, key: str, prepared: Any) -> None:
        """Makes `AddRequest.adapter == key` valid. Called between steps, and quick, except with vLLM, whose workers
        read the files then. Raises as `prepare_adapter`: slots may have been taken since."""
        ...

    def unload_adapter(self, key: str) -> None:
        """Frees it. No request will use it any more; steps under way may. Unknown keys are ignored."""
        ...
