"""`EncoderModel`: a folder's encoder, compiled, as a function from texts to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov

from penstock.engines.contract.loading import Loading, Report, silent
from penstock.engines.encoder.graph import build_encoder, build_exported
from penstock.engines.encoder.model_folder import EncoderOutline, SentenceRecipe, outline_of
from penstock.engines.encoder.rows import batch_inputs
from penstock.engines.encoder.text import EncoderInfo, TokenizedText, Vectors
from penstock.engines.errors import InvalidRequestError
from penstock.engines.formats.model_files import read_json
from penstock.engines.host.cores import usable_cores
from penstock.engines.openvino.checkpoint import Checkpoint
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.device import ThreadPlan, all_threads, compiled
from penstock.engines.openvino.numerics import ModelFacts, Numerics, Wish
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
        self._source = _open(config, outline, recipe, report)
        plan = ThreadPlan(config.threads or all_threads(usable_cores()))
        with compiled(self._source, [plan], report) as [model]:
            self._inputs = {port.any_name for port in model.inputs}
            self._request = model.create_infer_request()
            report(Loading("warm-up"))
            [row] = self.compute([TokenizedText([0])])
        self.info = EncoderInfo(
            max_tokens=max_tokens,
            vocab_size=outline.vocab_size,
            output_size=row.shape[-1],
            runner=f"openvino {self._source.numerics.words}, {plan.threads} threads",
        )

    def compute(self, texts: Sequence[TokenizedText]) -> Vectors | list[Vectors]:
        """Of each text [output size], or [tokens, output size]. Releases the GIL while it computes."""
        inputs = {
            name: array for name, array in batch_inputs(texts, self._possible_tokens).items() if name in self._inputs
        }
        self._request.infer(inputs, share_inputs=True)
        rows = np.array(self._request.get_output_tensor(0).data, np.float32)
        if not self._has_rows_of_tokens:
            return rows
        ends = np.cumsum([len(text) for text in texts])
        return np.split(rows, ends)[:-1]  # behind the last text stands what rounds the batch up


@dataclass(frozen=True)
class _Source:
    """An encoder before it is compiled, as a `GraphSource`."""

    numerics: Numerics
    outline: EncoderOutline
    recipe: SentenceRecipe
    weights: Weights | None = None
    """Of a graph that is built here; None: it is a file that has them."""
    checkpoint: Checkpoint | None = None
    """Of the weights: the compiled model may look into its files."""
    has_experts: bool = False

    def make(self) -> ov.Model:
        if self.outline.spec is None or self.weights is None:
            return build_exported(self.outline, self.recipe)
        graph = build_encoder(self.outline.spec, self.recipe, self.weights)
        self.weights.finish()
        return graph

    def release_pages(self) -> None:
        if self.weights is not None:
            self.weights.release_pages()


def _open(config: OpenVINOConfig, outline: EncoderOutline, recipe: SentenceRecipe, report: Report) -> _Source:
    if outline.spec is None:
        return _Source(settle(Wish.of(config), ModelFacts()), outline, recipe)
    checkpoint = Checkpoint(config.model_dir, outline.spec.rename)
    weights, numerics = open_weights(config, checkpoint, ModelFacts(), report)
    return _Source(numerics, outline, recipe, weights, checkpoint)


def longest_text(limit: int | None, advised: int | None, possible: int) -> int:
    """What the operator asks for, else what sentence-transformers' files say, and never more than the model can.

    Raises InvalidRequestError when the operator asks for more than that.
    """
    if limit is not None and limit > possible:
        raise InvalidRequestError(f"max_model_len={limit} is more than the model's {possible} tokens")
    return limit or min(advised or possible, possible)
