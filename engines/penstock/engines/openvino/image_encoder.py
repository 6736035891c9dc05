"""Image encoders as models of their own, beside the decoder."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import openvino as ov

from penstock.engines.contract.loading import Report, silent
from penstock.engines.contract.messages import ImageInput
from penstock.engines.contract.step import ImageRows
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.model_files import read_json_if_any
from penstock.engines.host.cores import usable_cores
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.decoder import FeatureTap
from penstock.engines.openvino.device import ThreadPlan, all_threads, compiled
from penstock.engines.openvino.loading import DecoderGraph, open_decoder
from penstock.engines.openvino.numerics import Dtype, Numerics
from penstock.engines.openvino.vision import VisionModel
from penstock.engines.openvino.vision_gemma3 import Gemma3Vision
from penstock.engines.openvino.vision_gemma4 import Gemma4Unified, Gemma4Vision
from penstock.engines.openvino.vision_idefics3 import Idefics3Vision
from penstock.engines.openvino.vision_internvl import InternVLVision
from penstock.engines.openvino.vision_lfm2 import Lfm2Vision
from penstock.engines.openvino.vision_pixtral import PixtralVision
from penstock.engines.openvino.vision_qwen import Qwen3Vision, Qwen25Vision, Qwen35Vision, QwenVision
from penstock.engines.openvino.weights import Weights

logger = logging.getLogger(__name__)

_MS_BETWEEN_LOOKS = 50
_QWEN = (QwenVision, Qwen25Vision, Qwen3Vision, Qwen35Vision)
VISION_MODELS: tuple[type[VisionModel], ...] = (
    Gemma3Vision,
    Gemma4Vision,
    Gemma4Unified,
    Idefics3Vision,
    InternVLVision,
    Lfm2Vision,
    PixtralVision,
    *_QWEN,
)


def vision_model(settings: Mapping[str, Any]) -> VisionModel | None:
    """`settings`: config.json. None: the model reads text only, or its eyes are not known here. Raises
    UnsupportedError for an encoder that cannot be run."""
    names = settings.get("architectures")
    known = set(names) if isinstance(names, list) else set()
    return next((model.of(settings) for model in VISION_MODELS if known & set(model.architectures)), None)


def open_with_images(
    config: OpenVINOConfig, tap: FeatureTap | None, report: Report
) -> tuple[DecoderGraph, ImageEncoder | None]:
    """The decoder, and its image encoder if there is one that can be run. Raises as `open_decoder`."""
    vision = None
    if find_spec("PIL") is not None:  # else no image can be prepared
        with _logged(config):
            vision = vision_model(read_json_if_any(config.model_dir / "config.json"))
    source = open_decoder(config, report, tap, vision)
    if vision is None or source.images is None:  # an exported graph has no inputs for it
        return source, None
    with _logged(config):
        return source, ImageEncoder(config, vision, source.numerics.dtype, report)
    return open_decoder(config, report, tap), None


@contextmanager
def _logged(config: OpenVINOConfig) -> Iterator[None]:
    """A model whose encoder cannot be run reads text only."""
    try:
        yield
    except (UnsupportedError, EngineError) as error:
        logger.warning("%s could read images, and reads text only: %s", config.model_dir.name, error)


class ImageEncoder:
    """Used by one thread at a time, beside the decoder. It takes memory from its first image on: many who serve a model
    that reads images never show it one."""

    def __init__(self, config: OpenVINOConfig, vision: VisionModel, dtype: Dtype, report: Report) -> None:
        """`dtype`: what it is computed in. Raises UnsupportedError for a checkpoint that it cannot run, EngineError for
        a broken one."""
        self.grid = vision.grid
        self.whole_tiles = vision.whole_tiles
        self._vision = vision
        self._config = config
        self._dtype: Dtype = dtype
        self._loaded: _Loaded | None = None
        source = _open(config, vision, dtype, report)
        self.reserved_bytes = _bytes_of(source.make(), dtype)
        """What it will take once it is loaded."""
        source.release_pages()

    def encode(self, image: ImageInput, is_over: Callable[[], bool]) -> ImageRows | None:
        """[tokens of all tiles, hidden size of the decoder]; None once `is_over`. Tile by tile, so that steps of the
        decoder get their turn between them. Releases the GIL while it computes."""
        loaded = self._loaded = self._loaded or self._load()
        rows, pixels, begin = [], np.frombuffer(image.pixels, np.uint8), 0
        for height, width in image.tiles:
            if is_over():
                return None
            end = begin + 3 * height * width
            inputs = self._vision.inputs(pixels[begin:end].reshape(1, height, width, 3))
            loaded.request.start_async(inputs)
            if not loaded.finishes(is_over):
                self._loaded = None
                return None
            rows.append(np.array(loaded.request.get_output_tensor(0).data, np.float32))
            begin = end
        return np.concatenate(rows)

    def _load(self) -> _Loaded:
        began = time.monotonic()
        source = _open(self._config, self._vision, self._dtype, silent)
        plan = ThreadPlan(self._config.threads or all_threads(usable_cores()))
        with compiled(source, [plan], silent) as [model]:
            request = model.create_infer_request()
            # OpenVINO 2026.4: a graph that begins with a single patch computes larger pictures wrongly ever after
            side = self.grid.side or 2 * self.grid.cell
            request.infer(self._vision.inputs(np.zeros((1, side, side, 3), np.uint8)))
        seconds = time.monotonic() - began
        logger.info("The image encoder was loaded within %.1f s.", seconds)
        return _Loaded(source, request, seconds)


@dataclass(frozen=True)
class _Loaded:
    """An encoder that computes."""

    source: _Source
    request: ov.InferRequest
    seconds: float
    """What loading took."""

    def finishes(self, is_over: Callable[[], bool]) -> bool:
        """Waits for what is under way. Once `is_over`, for no longer than loading took, as that is to be done again: an
        inference that was cancelled leaves shapes of its own in the graph, and the next one fails or, worse, does not.
        It is left between two operations of the graph. Raises RuntimeError."""
        while not self.request.wait_for(_MS_BETWEEN_LOOKS):
            if is_over():
                if self.request.wait_for(int(self.seconds * 1000)):
                    return True
                self.request.cancel()
                with suppress(RuntimeError):  # says that it was cancelled, unless it was done before
                    self.request.wait()
                return False
        return True


def _bytes_of(graph: ov.Model, dtype: Dtype) -> int:
    """Of the weights as they are packed for kernels, and a little for what is computed with them."""
    weights = (node for node in graph.get_ops() if node.get_type_name() == "Constant")
    return int(1.2 * (4 if dtype == "f32" else 2) * sum(math.prod(node.get_output_shape(0)) for node in weights))


@dataclass(frozen=True)
class _Source:
    """An encoder before it is compiled, as a `GraphSource`. Its weights stay floats: it is small beside the decoder."""

    numerics: Numerics
    vision: VisionModel
    weights: Weights
    checkpoint: Checkpoint
    """The compiled model may look into its files."""
    has_experts: bool = False

    def make(self) -> ov.Model:
        """Raises UnsupportedError when the checkpoint holds tensors that this graph would ignore."""
        graph = self.vision.graph(self.weights)
        ignored = self.weights.unused()
        if ignored:
            raise UnsupportedError(f"the checkpoint has {len(ignored)} tensors of an image encoder of another kind")
        self.weights.finish()
        return graph

    def release_pages(self) -> None:
        self.weights.release_pages()


def _open(config: OpenVINOConfig, vision: VisionModel, dtype: Dtype, report: Report) -> _Source:
    checkpoint = Checkpoint(config.model_dir, vision.own_name)
    if checkpoint.is_quantized:
        raise UnsupportedError("the checkpoint has an image encoder with quantized weights")
    numerics = Numerics(dtype=dtype, activations=dtype, kv=None, integers=None)
    return _Source(numerics, vision, Weights(checkpoint, "auto", report), checkpoint)
