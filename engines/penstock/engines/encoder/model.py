"""`EncoderModel`: a folder's encoder, compiled, as a function from texts to rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import openvino as ov

from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.encoder.exported import build_exported
from penstock.engines.encoder.graph import build_encoder
from penstock.engines.encoder.layout import batch_inputs
from penstock.engines.encoder.outline import outline_of
from penstock.engines.encoder.sentence_files import SentenceRecipe
from penstock.engines.encoder.text import EncoderInfo, TokenizedText, Vectors
from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.model_files import read_json
from penstock.engines.host.cores import usable_cores
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import QUANTIZED, OpenVINOConfig
from penstock.engines.openvino.device import all_threads, compile_encoder
from penstock.engines.openvino.numerics import ModelFacts, Wish
from penstock.engines.openvino.process_memory import mapped_pages_released
from penstock.engines.openvino.trials import settle
from penstock.engines.openvino.weights import Weights, open_weights


class EncoderModel:
    """Loading raises UnsupportedError for a model that it cannot run, EngineError for a broken one. Used by one thread
    at a time."""

    def __init__(self, config: OpenVINOConfig, recipe: SentenceRecipe, report: Report = silent) -> None:
        outline = outline_of(config.model_dir, read_json(config.model_dir / "config.json"))
        self._possible_tokens = outline.max_tokens
        self._has_rows_of_tokens = not recipe.pooling and outline.num_labels is None
        max_tokens = longest_text(config.max_model_len, recipe.max_tokens, outline.max_tokens)
        core = ov.Core()
        self._weights: Weights | None = None
        with ExitStack() as loading:
            if outline.spec is not None:
                self._checkpoint = Checkpoint(config.model_dir, outline.spec.rename)
                self._weights = open_weights(config, self._checkpoint, report)
                loading.enter_context(mapped_pages_released(self._weights.release_pages))
                graph = build_encoder(outline.spec, recipe, self._weights)
                self._weights.finish()
            else:
                graph = build_exported(core, outline, recipe)
            numerics = settle(_wish(config), ModelFacts(integers=config.weights in QUANTIZED))
            threads = config.threads or all_threads(usable_cores())
            report(Loading("compile"))
            compiled = compile_encoder(core, graph, numerics, threads)
            self._inputs = {port.any_name for port in compiled.inputs}
            self._request = compiled.create_infer_request()
            report(Loading("warm-up"))
            [row] = self.compute([TokenizedText([0])])
        self.info = EncoderInfo(
            max_tokens=max_tokens,
            vocab_size=outline.vocab_size,
            output_size=row.shape[-1],
            runner=f"openvino {numerics.words}, {threads} threads",
        )

    def compute(self, texts: Sequence[TokenizedText]) -> Vectors | list[Vectors]:
        """Of each text [output size], or [tokens, output size]. Releases the GIL while it computes."""
        given = {
            name: array for name, array in batch_inputs(texts, self._possible_tokens).items() if name in self._inputs
        }
        self._request.infer(given, share_inputs=True)
        rows = np.array(self._request.get_output_tensor(0).data, np.float32)
        if not self._has_rows_of_tokens:
            return rows
        ends = np.cumsum([len(text) for text in texts])
        return np.split(rows, ends)[:-1]  # behind the last text stands what rounds the batch up


def _wish(config: OpenVINOConfig) -> Wish:
    """bf16 is twice as fast, but vectors differ by more than a thousandth: it has to be set."""
    wish = Wish.of(config)
    return replace(wish, dtype="f32") if wish.dtype == "auto" else wish


def longest_text(asked: int | None, said: int | None, possible: int) -> int:
    """What the operator asks for, else what sentence-transformers' files say, and never more than the model can.

    Raises InvalidRequestError when the operator asks for more than that.
    """
    if asked is not None and asked > possible:
        raise InvalidRequestError(f"max_model_len={asked} is more than the model's {possible} tokens")
    return asked or min(said or possible, possible)
