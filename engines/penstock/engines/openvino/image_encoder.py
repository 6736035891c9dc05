"""Image encoders as models of their own, beside the decoder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import openvino as ov

from penstock.engines.contract.loading import Loading, Report
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
    """Used by one thread at a time, beside the decoder."""

    def __init__(self, config: OpenVINOConfig, vision: VisionModel, dtype: Dtype, report: Report) -> None:
        """`dtype`: what it is computed in. Raises UnsupportedError for a checkpoint that it cannot run, EngineError for
        a broken one."""
        self.grid = vision.grid
        self.whole_tiles = vision.whole_tiles
        self._vision = vision
        self._source = _open(config, vision, dtype, report)
        plan = ThreadPlan(config.threads or all_threads(usable_cores()))
        with compiled(self._source, [plan], report) as [model]:
            self._request = model.create_infer_request()
            report(Loading("warm-up"))
            side = self.grid.side or self.grid.cell
            self._encode_tile(np.zeros((1, side, side, 3), np.uint8), lambda: False)

    def encode(self, image: ImageInput, is_over: Callable[[], bool]) -> ImageRows | None:
        """[tokens of all tiles, hidden size of the decoder]; None once `is_over`. Tile by tile, so that steps of the
        decoder get their turn between them. Releases the GIL while it computes."""
        rows, pixels, begin = [], np.frombuffer(image.pixels, np.uint8), 0
        for height, width in image.tiles:
            end = begin + 3 * height * width
            tile = self._encode_tile(pixels[begin:end].reshape(1, height, width, 3), is_over)
            if tile is None:
                return None
            rows.append(tile)
            begin = end
        return np.concatenate(rows)

    def _encode_tile(self, tile: np.ndarray[Any, Any], is_over: Callable[[], bool]) -> ImageRows | None:
        """A tile that is under way is left between two operations of the graph: the longest of a picture of millions of
        pixels, its attention in one layer, takes seconds."""
        request = self._request
        request.start_async(self._vision.inputs(tile))
        while not request.wait_for(_MS_BETWEEN_LOOKS):
            if is_over():
                request.cancel()
                with suppress(RuntimeError):  # says that it was cancelled, unless it was done before
                    request.wait()
                return None
        return np.array(request.get_output_tensor(0).data, np.float32)


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
