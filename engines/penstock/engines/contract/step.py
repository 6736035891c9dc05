"""The scheduler's order to a runner for one step, and the runner's answer.

New requests travel whole, running ones as differences: a runner keeps, for each live request, its token ids, its block
tables and its parameters, from the `NewRequest` that introduced it until its id appears in `dropped_ids`.

Several steps can be under way (`ModelRunner.submit`, `collect`). They are computed in the order in which they were
submitted, so a step may need tokens that the one before has still to sample: the runner fills them in, the scheduler
learns them when it collects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import PoolingParams, SamplingParams, TokenLogprobs
from penstock.engines.errors import PenstockError
from penstock.kvcache import BlockSave

TO_BE_DRAFTED = -1
"""In place of a guess: the runner's draft model makes it (`ModelInfo.has_draft_model`)."""


ImageRows = npt.NDArray[np.float32]
"""[tokens, hidden size]: what an encoder makes of an image."""


class EmbeddingSpan(NamedTuple):
    """What the model reads at some positions of a prompt instead of the embeddings of the tokens there."""

    start: int
    rows: ImageRows
    """Of the positions from `start` on."""


class PlacedTile(NamedTuple):
    """Where a tile of an image stands in a prompt, and its size."""

    start: int
    height: int
    """In pixels."""
    width: int


@dataclass(slots=True)
class NewRequest:
    """A request that the runner does not know: new, forked, resumed after a preemption, or told again after `reset`."""

    id: int
    token_ids: list[int]
    """Prompt, and for a resumed request the tokens generated so far. The runner must copy what it keeps."""
    num_prompt_tokens: int
    block_ids: tuple[list[int], ...]
    """A block table for each of `ModelInfo.kv_groups`: position p lives in block_ids[g][p // block_size], slot
    p % block_size. In a group with a window, entries wholly behind the window do not belong to the request any
    more and are never read. Where there are `ModelInfo.states`, a table of their rows stands behind these: entry
    p // block_size is the row that gets the state behind position p, and the token at p reads the one of p - 1. Entries
    that follow each other may name the same row: of the states that go there it keeps the last one. Behind that the
    row may be read by several requests, and is not written again."""
    params: SamplingParams | PoolingParams
    seed: int
    """Always set; the random number of output token i is a pure function of (seed, i), so that preemption, batching
    and restarts of the computation cannot change it."""
    adapter: str = ""
    grammar: Any = None
    """What `GrammarHost.compile_grammar` gave for `params.grammar`."""
    embeddings: list[EmbeddingSpan] = field(default_factory=list)
    """By their positions, ascending, without overlaps. Only where `ModelInfo.image_grid` is set."""
    tiles: list[PlacedTile] = field(default_factory=list)
    """Of the images, by their positions. Only where `ModelInfo.has_grid_positions`."""


class BlockUpdate(NamedTuple):
    """The request's block table in `group` holds `block_ids` from entry `start` on: new blocks at its end, or the last
    block replaced after a copy on write."""

    request_id: int
    group: int
    start: int
    block_ids: list[int]


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Lists are parallel: entry i of each belongs to request_ids[i].

    A runner applies, in this order: dropped_ids, new_requests, block_updates, block_copies; then computes, for each
    request i, the tokens at positions [num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i]).
    Where that range reaches the request's last token, known or to be sampled by a step under way, it samples the next
    one (or, for a pooling request, takes the vector).
    """

    new_requests: list[NewRequest] = field(default_factory=list)
    request_ids: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    """Drafts and forced tokens included."""
    num_computed_tokens: list[int] = field(default_factory=list)
    """Of the request when this step begins: after all steps that are under way."""
    block_updates: list[BlockUpdate] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block): whole blocks, all layers of the group that uses them, keys and values, copied
    one after the other before the computation."""
    block_saves: list[BlockSave] = field(default_factory=list)
    """Evicted blocks whose contents are to be kept: they are read before the step is submitted (`BlockHost`)."""
    block_loads: list[tuple[int, Any]] = field(default_factory=list)
    """(block, contents) to be written before the step is submitted, after `block_saves`. No step under way reads or
    writes these blocks."""
    dropped_ids: list[int] = field(default_factory=list)
    """Finished, aborted or preempted: the runner forgets them. None of them is part of a step under way."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """id -> guesses of the tokens behind its last known one: the last of its scheduled tokens in this step. The runner
    samples at the last known token and at each guess, and keeps what it samples up to and including the first token
    that differs from the guess. No step under way samples for such a request. A list of TO_BE_DRAFTED asks the runner's
    draft model for so many guesses. It may make fewer, and the request then computes fewer tokens. Where there are
    `ModelInfo.states`, the last known token and the guesses behind it have one entry in the table of rows, and there
    are at most `ModelInfo.guess_states` guesses in a step, less one for each state that others have left there."""
    forced: dict[int, list[int]] = field(default_factory=dict)
    """id -> tokens of `ModelRunnerOutput.forced` behind its last one, known or to be sampled by a step under way: the
    last of its scheduled tokens in this step. The runner takes them as the request's tokens, and samples behind the
    last of them only."""
    total_num_scheduled_tokens: int = 0


@dataclass(slots=True)
class Drafting:
    """What the draft model did for one step."""

    num_guesses: dict[int, int] = field(default_factory=dict)
    """id -> guesses that were made and verified, for each request that asked for some."""
    passes: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds of each of its forward passes. The step's time contains them."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """Answers one SchedulerOutput."""

    sampled_token_ids: list[list[int]]
    """For each of request_ids, in order: the new tokens ([] where the prompt is not finished or a vector is wanted,
    one token otherwise, up to 1 + len(drafts) with drafts, all forced ones and one behind forced tokens). The runner
    has already appended them to its own copy of the request's tokens."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """id -> one entry per sampled token, for requests with params.logprobs set."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """id -> entries for the prompt positions computed in this step: the logprob of prompt token p + 1, given those up
    to p, for each scheduled position p whose successor is a prompt token; for requests with params.prompt_logprobs."""
    pooled: dict[int, list[float]] = field(default_factory=dict)
    """id -> the vector of a pooling request whose last token was computed in this step, as the model gives it: float32,
    not normalized."""
    forced: dict[int, list[int]] = field(default_factory=dict)
    """id -> tokens that come behind the sampled ones because the request's grammar leaves no others, as far as the
    runner knows them."""
    drafting: Drafting | None = None
    """Of a step that asked the draft model for guesses."""
    failed: dict[int, PenstockError] = field(default_factory=dict)
    """id -> the error that its client gets: NumericalError for NaN or infinite logits in this step, ModelNotFoundError
    for an adapter that the runner does not have, InvalidRequestError for parameters that it does not take. These
    requests sampled nothing; the others are not affected."""
