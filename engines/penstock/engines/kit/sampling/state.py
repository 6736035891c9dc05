"""The sampling state of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import PenstockError
from penstock.engines.kit.sampling.grammar import GrammarState
from penstock.engines.kit.sampling.limits import TokenLimits
from penstock.engines.kit.sampling.masks import TokenMask
from penstock.engines.kit.sampling.plain import is_plain
from penstock.engines.kit.sampling.processors import ProcessorChain
from penstock.engines.kit.sampling.uniform import branch, stream_key

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_NO_IDS = np.zeros(0, np.int64)


class TokenCounts:
    """How often each token occurs in the output; prompt tokens are listed, too, with count 0.

    Kept as pairs of id and count, so that the cost of a step depends on the request's length, not on the vocabulary's.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        ids = np.unique(np.asarray([*prompt, *output], np.int64))
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        for token_id in output:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Counts one more output token."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = self._size
            self._size += 1
            if slot == len(self._ids):
                self._ids, self._counts = np.resize(self._ids, 2 * slot), np.resize(self._counts, 2 * slot)
            self._ids[slot], self._counts[slot] = token_id, 0
        self._counts[slot] += 1

    @property
    def ids(self) -> Ids:
        """Of all tokens that are counted."""
        return self._ids[: self._size]

    def penalize(self, logits: Floats, params: SamplingParams) -> None:
        """Changes `logits` [vocab] in place.

        Repetition: tokens of prompt and output, positive logits divided, negative ones multiplied (arXiv:1909.05858).
        Frequency and presence: tokens of the output, count * frequency and once presence subtracted (OpenAI's API).
        """
        ids, counts = self.ids, self._counts[: self._size]
        values = logits[ids]
        repetition = np.float32(params.repetition_penalty)
        if repetition != 1:
            values = np.where(values > 0, values / repetition, values * repetition)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[ids] = values


@dataclass(slots=True)
class SamplingState:
    """A request whose next token is more than the largest logit, or that wants logprobs."""

    params: SamplingParams
    key: int
    """Of its sequence of random numbers."""
    num_output_tokens: int
    greedy: bool
    counts: TokenCounts | None
    """None where no penalty is asked for."""
    bias: tuple[Ids, Floats] | None
    """Token ids and what is added to their logits."""
    stop_ids: Ids
    """Not to be sampled before min_tokens."""
    grammar: GrammarState | None = None
    limits: TokenLimits | None = None
    """None where `allowed_token_ids` and `bad_words` say nothing."""
    processors: ProcessorChain | None = None

    @staticmethod
    def create(
        params: SamplingParams,
        seed: int,
        eos_token_ids: Sequence[int],
        prompt: Sequence[int],
        output: Sequence[int],
        grammar: GrammarState | None = None,
        processors: ProcessorChain | None = None,
    ) -> SamplingState | None:
        """None for a plain greedy request: its token is the argmax, and nothing needs to be remembered."""
        if is_plain(params) and grammar is None and processors is None:
            return None
        penalized = bool(params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty)
        limits = None
        if params.bad_words or params.allowed_token_ids is not None:
            limits = TokenLimits(params, output)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        bias = params.logit_bias
        return SamplingState(
            params=params,
            key=stream_key(seed),
            num_output_tokens=len(output),
            greedy=not params.is_random,
            counts=TokenCounts(prompt, output) if penalized else None,
            bias=(np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)) if bias else None,
            stop_ids=np.array(sorted(stop_ids), np.int64),
            grammar=grammar,
            limits=limits,
            processors=processors,
        )

    @property
    def depends_on_output(self) -> bool:
        """Whether the next token depends on which tokens came out before, other than through the logits."""
        if self.limits is not None and self.limits.depends_on_output:
            return True
        return self.counts is not None or self.grammar is not None or self.processors is not None

    @property
    def is_masked(self) -> bool:
        """Whether `mask` has anything to say of the next token."""
        return self.limits is not None or (self.grammar is not None and not self.grammar.is_free)

    def mask(self) -> TokenMask | None:
        """Of the next token; None: there is a `failure`."""
        mask = None
        if self.grammar is not None and not self.grammar.is_free:
            mask = self.grammar.mask()
            if mask is None:
                return None
        return mask if self.limits is None else self.limits.narrowed(mask)

    @property
    def failure(self) -> PenstockError | None:
        """Why the output cannot be continued."""
        failure = self.processors.failure if self.processors is not None else None
        return failure or (self.grammar.failure if self.grammar is not None else None)

    def changes_logits(self, offset: int = 0) -> bool:
        """Whether `adjust` has anything to do for the token `offset` places behind the next one."""
        adds = self.counts is not None or self.bias is not None or self.processors is not None
        return adds or self._stop_is_masked(offset)

    def adjust(self, logits: Floats, offset: int = 0) -> tuple[Ids, Floats]:
        """Changes a row of logits [vocab] in place: processors, logit_bias, then min_tokens, then penalties.

        Returns the ids whose logits may have changed, and what these were.
        """
        if self.processors is not None:
            changed, before = np.arange(len(logits)), logits.copy()
            self.processors.apply(logits)
            self._adjust(logits, offset)
            return changed, before
        return self._adjust(logits, offset)

    def _adjust(self, logits: Floats, offset: int) -> tuple[Ids, Floats]:
        changed = np.concatenate(
            [
                self.bias[0] if self.bias is not None else _NO_IDS,
                self.stop_ids if self._stop_is_masked(offset) else _NO_IDS,
                self.counts.ids if self.counts is not None else _NO_IDS,
            ]
        )
        before = logits[changed]
        if self.bias is not None:
            ids, values = self.bias
            logits[ids] += values
        if self._stop_is_masked(offset):
            logits[self.stop_ids] = -np.inf
        if self.counts is not None:
            self.counts.penalize(logits, self.params)
        return changed, before

    def random_key(self, offset: int = 0) -> int:
        """Of the random numbers for the token `offset` places behind the next one."""
        return branch(self.key, self.num_output_tokens + offset)

    def append(self, token_id: int) -> None:
        """Takes note of a sampled token that the request keeps."""
        self.num_output_tokens += 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.append(token_id)
        if self.limits is not None:
            self.limits.append(token_id)
        if self.processors is not None:
            self.processors.append(token_id)

    def _stop_is_masked(self, offset: int) -> bool:
        if self.num_output_tokens + offset >= self.params.min_tokens or len(self.stop_ids) == 0:
            return False
        return self.grammar is None or not self.grammar.is_complete  # then nothing else is allowed
