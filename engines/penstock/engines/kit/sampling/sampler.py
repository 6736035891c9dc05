"""From logits to tokens and their log-probabilities, for a batch of requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import TokenLogprobs
from penstock.engines.kit.sampling.drawing import DrawingBuffers, RowCuts, column_maxima, draw, in_order, kth_largest
from penstock.engines.kit.sampling.plain import largest
from penstock.engines.kit.sampling.state import SamplingState

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_LOGITS_PER_THREAD = 1 << 18
"""At least: fewer are not worth waking a thread, and threads with short array operations wait for the interpreter."""
_ROWS_AT_A_TIME = 64
"""Of which logprobs are computed: bounds the memory for them."""
_FEWEST = 1024
"""Tokens of a row that are looked at together with those of others, when the largest logit is taken."""
_WIDTHS = (64, 1024, 8192)
"""Tokens that a grammar allows are laid out in rows of one of these, or of the whole vocabulary."""


@dataclass(slots=True)
class Extension:
    """What a request is extended by in a step."""

    token_ids: list[int] = field(default_factory=list)
    finite: bool = True
    """False where a row that was needed has a NaN or an infinite maximum; `token_ids` are those before it."""


class _Request(NamedTuple):
    row: int
    state: SamplingState
    offset: int


class Sampler:
    """Chooses tokens; holds nothing but working memory and threads. Not for use from several threads."""

    def __init__(self, vocab_size: int, num_threads: int = 1) -> None:
        """`num_threads` share the rows; the model should leave them idle meanwhile."""
        self._memories = [DrawingBuffers(vocab_size) for _ in range(num_threads)]
        self._threads = ThreadPoolExecutor(num_threads - 1, "sampling") if num_threads > 1 else None

    def extend(
        self, logits: Floats, states: Sequence[SamplingState | None], drafts: Sequence[Sequence[int]]
    ) -> list[Extension]:
        """Tokens for each request, also appended to the states.

        Request r has 1 + len(drafts[r]) rows of `logits` [N, vocab], one request after the other: behind its last known
        token and behind each draft. Its tokens are kept up to and including the first one that differs from its draft:
        what sampling one by one gives.
        """
        extensions = [Extension() for _ in states]
        counts = np.array([1 + len(guesses) for guesses in drafts], np.int64)
        starts = np.cumsum(counts) - counts
        left = list(range(len(states)))
        while left:
            # All rows of a request at once, unless they depend on one another: then the next one only.
            pieces = []
            for r in left:
                state, first = states[r], int(starts[r]) + len(extensions[r].token_ids)
                pieces.append(np.arange(first, first + (1 if state and state.depends_on_output else int(counts[r]))))
            rows = np.concatenate(pieces)
            owners = [states[r] for r, piece in zip(left, pieces, strict=True) for _ in piece]
            offsets = np.concatenate([np.arange(len(piece)) for piece in pieces])
            sampled = iter(self.sample(logits if len(rows) == len(logits) else logits[rows], owners, offsets).tolist())
            left = [
                r
                for r, piece in zip(left, pieces, strict=True)
                if _keep([next(sampled) for _ in piece], states[r], drafts[r], extensions[r])
            ]
        return extensions

    def sample(self, logits: Floats, states: Sequence[SamplingState | None], offsets: Ids | None = None) -> Ids:
        """[S]: a token for each row of `logits` [S, vocab] f32; -1 where it has a NaN or an infinite maximum.

        None in `states`: plain greedy. Row r gets output token number num_output_tokens + offsets[r] of its state (0
        where not given); several rows may be of one state, unless it depends on the output. States are only read: the
        caller appends what it keeps. `logits` are as before when this returns; until then they are changed in place
        where bias, min_tokens or penalties say so (in a copy, if they cannot be written to).

        In this order: processors, logit_bias, min_tokens, penalties, masks, temperature, min_p, top_k, top_p, random
        numbers. A row is also -1 where no token is allowed, and where a processor fails.
        """
        token_ids = np.empty(len(states), np.int64)
        if not any(states):
            return largest(logits)
        if offsets is None:
            offsets = np.zeros(len(states), np.int64)
        numbered = enumerate(zip(states, offsets.tolist(), strict=True))
        active = [_Request(row, state, offset) for row, (state, offset) in numbered if state is not None]
        masked = [one for one in active if one.state.is_masked]
        changed = [one for one in active if one.state.changes_logits(one.offset)]
        if (changed or masked) and not (logits.flags.writeable and logits.flags.c_contiguous):
            logits = logits.copy()
        undo = [(one.row, *one.state.adjust(logits[one.row], one.offset)) for one in changed]
        chosen = {one.row for one in changed if one.state.failure is not None}
        token_ids[list(chosen)] = -1
        few: list[tuple[_Request, Ids]] = []
        forbidden: list[tuple[int, Ids]] = []
        for one in masked:
            if one.row in chosen:
                continue
            mask = one.state.mask()
            if mask is None or (mask.allowed and len(mask.ids) == 0):
                token_ids[one.row] = -1
                chosen.add(one.row)
            elif mask.allowed:
                few.append((one, mask.ids))
                chosen.add(one.row)
            else:
                forbidden.append((one.row, mask.ids))
        if few:
            _choose_among(logits, few, token_ids)
        if forbidden:
            places, values = _forbid(logits, forbidden)
        drawn = [one for one in active if not one.state.greedy and one.row not in chosen]
        if len(drawn) + len(chosen) < len(states):
            left = (row for row, state in enumerate(states) if state is None or state.greedy)
            self._take_largest(logits, np.array([row for row in left if row not in chosen]), token_ids)
        if drawn:
            self._draw(logits, drawn, token_ids)
        if forbidden:
            logits.reshape(-1)[places] = values
        for index, ids, before in undo:
            logits[index, ids] = before
        return token_ids

    def _take_largest(self, logits: Floats, rows: Ids, token_ids: Ids) -> None:
        """Fills in `token_ids` of these rows."""
        if len(rows) == len(logits):
            token_ids[:] = largest(logits)
            return
        token_ids[rows] = [logits[row].argmax() for row in rows.tolist()]
        token_ids[rows[~np.isfinite(logits[rows, token_ids[rows]])]] = -1  # as in `largest`

    def _draw(self, logits: Floats, drawn: list[_Request], token_ids: Ids) -> None:
        """Fills in `token_ids` of these rows, shared among the threads."""
        vocab = logits.shape[1]
        rows = np.array([one.row for one in drawn])
        cuts = _cuts(drawn, vocab)
        num_parts = min(len(self._memories), len(rows) * vocab // _LOGITS_PER_THREAD)
        if num_parts < 2:
            token_ids[rows] = draw(logits, rows, cuts, self._memories[0])
            return
        parts = np.array_split(np.arange(len(rows)), num_parts)
        work = [(logits, rows[part], cuts[part], memory) for part, memory in zip(parts, self._memories, strict=False)]
        futures = [self._threads.submit(draw, *one) for one in work[1:]] if self._threads else []
        token_ids[rows[parts[0]]] = draw(*work[0])
        for part, future in zip(parts[1:], futures, strict=True):
            token_ids[rows[part]] = future.result()


def _cuts(drawn: Sequence[_Request], vocab: int) -> RowCuts:
    """`vocab`: how many tokens are drawn from."""
    params = [one.state.params for one in drawn]
    return RowCuts(
        temperatures=np.array([p.temperature for p in params], np.float64),
        top_k=np.array([min(p.top_k, vocab) or vocab for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float64),
        min_p=np.array([p.min_p for p in params], np.float64),
        keys=np.array([one.state.random_key(one.offset) for one in drawn], np.uint64),
    )


def _forbid(logits: Floats, forbidden: Sequence[tuple[int, Ids]]) -> tuple[Ids, Floats]:
    """Takes these tokens away from their rows. Returns where these are in all of the logits, and what was there."""
    vocab, every = logits.shape[1], logits.reshape(-1)
    places = np.concatenate([row * vocab + ids for row, ids in forbidden])
    values = every[places]
    every[places] = -np.inf
    return places, values


def _choose_among(logits: Floats, few: Sequence[tuple[_Request, Ids]], token_ids: Ids) -> None:
    """Fills in `token_ids` of these rows, each of which has no more than these tokens to choose from."""
    by_width: dict[int, list[tuple[_Request, Ids]]] = {}
    largest: list[tuple[_Request, Ids]] = []
    for one, ids in few:
        if len(ids) == 1 or (one.state.greedy and len(ids) <= _FEWEST):
            largest.append((one, ids))
        elif one.state.greedy:
            values = logits[one.row, ids]
            best = int(values.argmax())
            token_ids[one.row] = ids[best] if np.isfinite(values[best]) else -1
        else:
            width = next((width for width in _WIDTHS if len(ids) <= width), logits.shape[1])
            by_width.setdefault(width, []).append((one, ids))
    if largest:
        _take_largest_among(logits, largest, token_ids)
    for width, some in by_width.items():
        # The width depends on nothing but the row, and with it how sums are rounded.
        values = np.full((len(some), width), -np.inf, np.float32)
        for row, (one, ids) in zip(values, some, strict=True):
            row[: len(ids)] = logits[one.row, ids]
        places = draw(values, np.arange(len(some)), _cuts([one for one, _ in some], width), DrawingBuffers(width))
        for (one, ids), place in zip(some, places.tolist(), strict=True):
            token_ids[one.row] = ids[place] if place >= 0 else -1


def _take_largest_among(logits: Floats, some: Sequence[tuple[_Request, Ids]], token_ids: Ids) -> None:
    """`_choose_among` for rows whose largest logit is taken, all at once."""
    counts = np.array([len(ids) for _, ids in some])
    rows, ids = np.array([one.row for one, _ in some]), np.concatenate([ids for _, ids in some])
    starts = np.cumsum(counts) - counts
    values = logits[np.repeat(rows, counts), ids]
    largest = np.maximum.reduceat(values, starts)
    places = np.flatnonzero(values == np.repeat(largest, counts))
    finite = np.isfinite(largest)
    token_ids[rows] = -1
    token_ids[rows[finite]] = ids[places[np.searchsorted(places, starts[finite])]]


def token_logprobs_rows(logits: Floats, token_ids: Ids, top: int | Ids) -> list[TokenLogprobs]:
    """Log-probabilities of the model's own distribution.

    Of token_ids[n] at each row of `logits` [N, vocab], unscaled and with a finite maximum; with the top[n] likeliest
    tokens, by probability and then by id.
    """
    tops = np.broadcast_to(np.asarray(top, np.int64), len(token_ids))
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_A_TIME):
        some = slice(start, start + _ROWS_AT_A_TIME)
        entries += _token_logprobs(logits[some], token_ids[some], tops[some])
    return entries


def _token_logprobs(logits: Floats, token_ids: Ids, top: Ids) -> list[TokenLogprobs]:
    rows = np.arange(len(logits))
    maxima = column_maxima(logits, rows)
    peaks = maxima.max(axis=1)
    floors = np.where(top > 0, kth_largest(maxima, np.maximum(top, 1)), peaks)
    best, values = in_order(logits, rows, maxima >= floors[:, None], floors)
    entries = []
    weights = np.empty(logits.shape[1], np.float32)
    for n, (row, token_id) in enumerate(zip(logits, token_ids.tolist(), strict=True)):
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(row, peaks[n], out=weights)
            np.exp(weights, out=weights)
        total = float(peaks[n]) + float(np.log(weights.sum()))
        likeliest = (values[n, : top[n]].astype(np.float64) - total).tolist()
        entries.append(
            TokenLogprobs(
                token_id=token_id,
                logprob=float(row[token_id]) - total,
                rank=1 + int(np.count_nonzero(row > row[token_id])),
                top=list(zip(best[n, : top[n]].tolist(), likeliest, strict=True)),
            )
        )
    return entries


def _keep(token_ids: Iterable[int], state: SamplingState | None, drafts: Sequence[int], extension: Extension) -> bool:
    """Keeps tokens as long as the drafts before them were right. True if all were kept and drafts are left to check."""
    for token_id in token_ids:
        position = len(extension.token_ids)
        if token_id < 0:
            extension.finite = False
            return False
        extension.token_ids.append(token_id)
        if state is not None:
            state.append(token_id)
        if position == len(drafts) or token_id != drafts[position]:
            return False
    return True
