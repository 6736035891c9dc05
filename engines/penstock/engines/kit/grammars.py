"""Grammars of the requests of a runner that uses our sampler."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engines.contract.messages import GRAMMAR, Grammar
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.engines.host.cores import usable_cores
from penstock.engines.kit.sampling.grammar import GrammarState, MasksAhead
from penstock.engines.kit.sampling.masks import BitMasks, bit_masks

if TYPE_CHECKING:
    from penstock.tokenizers.grammars import GrammarCompiler, ThoughtTags

_MASK_THREADS = 4
"""At most: the model needs the cores meanwhile."""


class Grammars:
    """Compiles grammars, and follows each output through its own. Costs nothing before the first request with one."""

    def __init__(self, model_dir: Path, info: ModelInfo) -> None:
        self._model_dir = model_dir
        self._info = info
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._masks: MasksAhead | None = None

    def compile(self, grammar: Grammar) -> Any:
        """`GrammarHost.compile_grammar`."""
        from penstock.tokenizers.errors import TokenizerError
        from penstock.tokenizers.grammars import GrammarCompiler, GrammarError

        with self._lock:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._model_dir, self._info.vocab_size, self._info.eos_token_ids)
        try:
            thought = None if grammar.thought is None else (grammar.thought.begin, grammar.thought.end)
            return self._compiler.compile(grammar.kind, grammar.text, thought, grammar.preface, _budget(grammar))
        except GrammarError as error:
            raise InvalidRequestError(
                f"The {_NAMES[grammar.kind]} cannot be compiled: {error}", param=GRAMMAR
            ) from None
        except TokenizerError as error:
            raise EngineError(f"This model has no structured output: {error}") from None

    def is_worn_out(self, compiled: Any) -> bool:
        """`GrammarHost.is_worn_out`."""
        return bool(compiled.is_worn_out)

    def start(self, compiled: Any, output: Sequence[int]) -> GrammarState:
        """For a request whose output so far is this. `compiled`: by `compile`."""
        return GrammarState(compiled.start(output), self._masks or self._make_masks())

    def begin_masks(self, states: Sequence[GrammarState]) -> None:
        """Computes what they allow next, while the caller does other things."""
        if states and self._masks is not None:
            self._masks.begin(states)

    def bit_masks(self, states: Sequence[GrammarState]) -> BitMasks:
        """[n, ceil(vocab / 32)]: the masks of the next tokens, for runners whose sampler is not ours. Those of states
        with a `failure` mean nothing."""
        masks = bit_masks(len(states), self._info.vocab_size)
        (self._masks or self._make_masks()).fill(states, masks)
        return masks

    def _make_masks(self) -> MasksAhead:
        from penstock.tokenizers.grammars import MaskFiller

        num_threads = max(1, min(_MASK_THREADS, usable_cores() // 2))
        self._masks = MasksAhead(MaskFiller(num_threads), self._info.vocab_size)
        return self._masks


def _budget(grammar: Grammar) -> tuple[ThoughtTags, int] | None:
    from penstock.tokenizers.grammars import ThoughtTags

    budget = grammar.budget
    if budget is None:
        return None
    return ThoughtTags(budget.openings, budget.endings, budget.closing, budget.inside, budget.again), budget.tokens


_NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
    "text": "text",
}
