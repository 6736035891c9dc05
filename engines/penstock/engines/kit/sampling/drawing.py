"""Random draws from truncated distributions: exact, without ordering or exponentiating the vocabulary.

A distribution is softmax(logits / temperature), cut by min_p, then top_k, then top_p. Each of these keeps a beginning
of the tokens ordered by probability, ties ordered by id. min_p compares with the likeliest token, top_k counts, top_p
is taken of what the two have left.

The vocabulary is laid out as a matrix of 32 lines: token `line * width + column` is in `column`. One pass over a row
finds the maxima of its columns. They bound everything else: a token above some value is in a column whose maximum is
above it, and a column weighs at most 32 times its maximum. With them, a row is drawn from in one of three ways (a small
vocabulary needs none of this: `_draw_from_few`):

- **From the likeliest** (top_k, peaked distributions): tokens of the columns with the largest maxima are ordered and
  drawn from, if they provably hold all that is kept.
- **By rejection** (flat distributions): tokens are drawn from the uncut distribution until one is kept. That takes no
  sum over the vocabulary: a column is drawn in proportion to its bound, one of its tokens evenly, and accepted with the
  ratio of its weight to the bound. Whether top_p keeps it follows from the weight of likelier tokens.
- **From all in order**, where neither does.

Which way is taken depends on nothing but the row and its parameters: a token is a pure function of these and of a key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engines.kit.sampling.uniform import uniforms

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_LINES = 32
_LIKELY_COLUMNS = 64
"""Where the nucleus is looked for first."""
_MOST_COLUMNS = 1 / 4
"""Of the columns: with more of them, ordering their tokens is no gain."""
_TRIES = 64
"""Of rejection in a round."""
_ROUNDS = 8
_SMALL_VOCABULARY = 8192
_TRIES_FROM_FEW = 3
_SPAN = 64
"""Tokens of a small vocabulary whose weights are summed up first."""


@dataclass(frozen=True, slots=True)
class RowCuts:
    """How rows are cut, and the keys of their random numbers. All arrays are [n]."""

    temperatures: Doubles
    top_k: Ids
    """The vocabulary's size where it is not asked for."""
    top_p: Doubles
    min_p: Doubles
    keys: npt.NDArray[np.uint64]

    def __getitem__(self, rows: Ids) -> RowCuts:
        return RowCuts(self.temperatures[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows])


class DrawingBuffers:
    """For one row at a time, in one thread."""

    def __init__(self, vocab_size: int) -> None:
        self.floats = np.empty(vocab_size, np.float32)
        self.ints = np.empty(vocab_size, np.int32)
        self.mask = np.empty(vocab_size, np.bool_)
        self.zeros = np.zeros(vocab_size, np.float32)


def draw(logits: Floats, rows: Ids, cuts: RowCuts, memory: DrawingBuffers) -> Ids:
    """A token for each of these rows [n] of `logits` [N, vocab]; -1 where one has a NaN or an infinite maximum."""
    vocab = logits.shape[1]
    if vocab <= _SMALL_VOCABULARY:
        return _draw_from_few(logits, rows, cuts, memory)
    tokens = np.full(len(rows), -1)
    maxima = column_maxima(logits, rows)
    peaks = maxima.max(axis=1)
    left = np.flatnonzero(np.isfinite(peaks))
    if len(left) == 0:
        return tokens
    columns = _Columns.of(rows[left], maxima[left], peaks[left], cuts[left])
    by_rank = cuts.top_k < vocab
    cut = left[(by_rank | (cuts.top_p < 1) | (cuts.min_p > 0))[left]]
    if len(cut):
        tokens[cut] = _draw_from_likeliest(logits, columns[np.searchsorted(left, cut)])
    rest = left[(tokens[left] < 0) & ~by_rank[left]]
    if len(rest):
        tokens[rest] = _draw_by_rejection(logits, columns[np.searchsorted(left, rest)], memory)
    for n in left[tokens[left] < 0].tolist():
        tokens[n] = _draw_from_all(logits[rows[n]], cuts[np.array([n])])
    return tokens


def column_maxima(logits: Floats, rows: Ids) -> Floats:
    """[n, width] of these rows; NaN where a column has one."""
    vocab = logits.shape[1]
    width = -(-vocab // _LINES)
    whole = vocab // width * width
    maxima = np.empty((len(rows), width), np.float32)
    for row, row_maxima in zip(rows.tolist(), maxima, strict=True):
        np.maximum.reduce(logits[row, :whole].reshape(-1, width), axis=0, out=row_maxima)
        rest = row_maxima[: vocab - whole]
        np.maximum(rest, logits[row, whole:], out=rest)
    return maxima


def kth_largest(maxima: Floats, counts: Ids) -> Floats:
    """[n]: of each row of `maxima` [n, width] the counts[n]-th largest, -inf if there is none.

    At least that many tokens are not below it, so the likeliest ones are among these.
    """
    width = maxima.shape[1]
    largest = np.full(len(maxima), -np.inf, np.float32)
    for count in np.unique(counts[counts <= width]).tolist():
        same = np.flatnonzero(counts == count)
        largest[same] = np.partition(maxima[same], width - count, axis=1)[:, width - count]
    return largest


def in_order(logits: Floats, rows: Ids, inside: npt.NDArray[np.bool_], floors: Floats) -> tuple[Ids, Floats]:
    """Ids and logits [n, most] of the tokens at or above the floors [n], in order of probability.

    `inside` [n, width]: the columns that may have some. Behind a row's last one are tokens with logit -inf.
    """
    owners, columns = np.nonzero(inside)
    ids = columns[:, None] + inside.shape[1] * np.arange(_LINES)
    beyond = ids >= logits.shape[1]
    ids[beyond] = 0
    values = logits[rows[owners, None], ids]
    kept = (values >= floors[owners, None]) & ~beyond
    owners, ids, values = np.broadcast_to(owners[:, None], ids.shape)[kept], ids[kept], values[kept]
    order = np.lexsort((ids, -values, owners))
    owners = owners[order]
    counts = np.bincount(owners, minlength=len(rows))
    places = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    shape = (len(rows), int(counts.max()))
    ordered_ids, ordered_values = np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32)
    ordered_ids[owners, places], ordered_values[owners, places] = ids[order], values[order]
    return ordered_ids, ordered_values


@dataclass(frozen=True, slots=True)
class _Columns:
    """Rows, by their columns."""

    rows: Ids
    """[n]: their indices."""
    maxima: Floats
    """[n, width]."""
    weights: Floats
    """[n, width]: e^((maximum - peak) / temperature)."""
    peaks: Floats
    """[n]: the largest logits."""
    least: Floats
    """[n]: the least logits that min_p keeps."""
    cuts: RowCuts

    @staticmethod
    def of(rows: Ids, maxima: Floats, peaks: Floats, cuts: RowCuts) -> _Columns:
        with np.errstate(over="ignore", under="ignore"):
            weights = maxima - peaks[:, None]
            weights *= (1 / cuts.temperatures[:, None]).astype(np.float32)
            np.exp(weights, out=weights)
        return _Columns(rows, maxima, weights, peaks, _least_kept(peaks, cuts), cuts)

    def __getitem__(self, n: Ids) -> _Columns:
        """Some of the rows, ascending."""
        if len(n) == len(self.rows):
            return self
        return _Columns(self.rows[n], self.maxima[n], self.weights[n], self.peaks[n], self.least[n], self.cuts[n])


def _least_kept(peaks: Floats, cuts: RowCuts) -> Floats:
    with np.errstate(divide="ignore"):
        return (peaks + cuts.temperatures * np.log(cuts.min_p)).astype(np.float32)


def _weights(logits: Floats, peaks: Floats, temperatures: Doubles) -> Doubles:
    """e^((logit - peak) / temperature), of arrays that broadcast."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.exp((logits - peaks.astype(np.float64)) / temperatures)


def _draw_from_likeliest(logits: Floats, columns: _Columns) -> Ids:
    """[n]: a token for each row, -1 where the columns with the largest maxima may not hold all that is kept."""
    vocab, width = logits.shape[1], columns.maxima.shape[1]
    cuts = columns.cuts
    by_rank = cuts.top_k < vocab
    counts = np.where(by_rank, cuts.top_k, _LIKELY_COLUMNS)
    floors = np.maximum(kth_largest(columns.maxima, counts), columns.least)
    inside = columns.maxima >= floors[:, None]
    # What is below the floor counts in top_p's total only, and only if neither top_k nor min_p cuts it off.
    open_ended = ~by_rank & (floors > columns.least)
    outside = np.where(inside, np.float32(0), columns.weights).sum(axis=1)
    # Where most of the weight may be outside, as it is in flat distributions, the tokens are not even looked at.
    held = _LINES * (columns.weights.sum(axis=1) - outside)
    few = np.flatnonzero(
        (inside.sum(axis=1) <= max(_LIKELY_COLUMNS, width * _MOST_COLUMNS))
        & (~open_ended | (held >= cuts.top_p * (held + outside)))
    )
    tokens = np.full(len(floors), -1)
    if len(few):
        columns, cuts, floors, inside = columns[few], cuts[few], floors[few], inside[few]
        ids, values = in_order(logits, columns.rows, inside, floors)
        below = inside.sum(axis=1) * _LINES - np.isfinite(values).sum(axis=1)
        beside = _LINES * outside[few] + below * _weights(floors, columns.peaks, cuts.temperatures)
        unlisted = np.where(open_ended[few], beside, 0)
        tokens[few] = _draw_from_ordered(ids, values, columns.peaks, columns.least, unlisted, cuts)
    return tokens


def _draw_from_all(row: Floats, cuts: RowCuts) -> int:
    ids = np.argsort(-row, kind="stable")[None]
    peak = row[ids[0, :1]]
    return int(_draw_from_ordered(ids, row[ids], peak, _least_kept(peak, cuts), np.zeros(1), cuts)[0])


def _draw_from_ordered(ids: Ids, values: Floats, peaks: Floats, least: Floats, unlisted: Doubles, cuts: RowCuts) -> Ids:
    """[n]: a token for each row; -1 where those listed may not be all that are kept.

    `ids`, `values` [n, m]: the likeliest tokens of each row, in order, and their logits. `unlisted` [n]: what the
    tokens that are not listed may weigh at most together, where the likeliest one weighs 1; 0 where all are listed that
    min_p and top_k keep.
    """
    weights = _weights(values, peaks[:, None], cuts.temperatures[:, None])
    weights[(np.arange(ids.shape[1]) >= cuts.top_k[:, None]) | (values < least[:, None])] = 0
    sums = np.cumsum(weights, axis=1)
    likelier, totals = sums - weights, sums[:, -1]
    counts = (likelier < (cuts.top_p * totals)[:, None]).sum(axis=1)
    most = cuts.top_p * (totals + unlisted)
    unsure = (totals < most) | ((likelier < most[:, None]).sum(axis=1) != counts)
    kept = np.take_along_axis(sums, counts[:, None] - 1, axis=1)
    places = (sums <= uniforms(cuts.keys, 0, 1) * kept).sum(axis=1)
    return np.where(unsure, -1, ids[np.arange(len(ids)), np.minimum(places, counts - 1)])


def _draw_by_rejection(logits: Floats, columns: _Columns, memory: DrawingBuffers) -> Ids:
    """[n]: a token for each row, -1 where no try of all rounds is kept. top_k is not heeded."""
    vocab, width = logits.shape[1], columns.maxima.shape[1]
    cuts = columns.cuts
    tokens = np.full(len(columns.rows), -1)
    for round_ in range(_ROUNDS):
        left = np.flatnonzero(tokens < 0)
        if len(left) == 0:
            break
        numbers = uniforms(cuts.keys[left], 1 + round_ * 3 * _TRIES, 3 * _TRIES).reshape(-1, 3, _TRIES)
        drawn = np.empty((len(left), _TRIES), np.int64)
        for n, row_numbers, row_drawn in zip(left.tolist(), numbers[:, 0], drawn, strict=True):
            sums = np.cumsum(columns.weights[n], dtype=np.float64)
            row_drawn[:] = np.searchsorted(sums, row_numbers * sums[-1], side="right")
        np.minimum(drawn, width - 1, out=drawn)
        ids = drawn + width * (numbers[:, 1] * _LINES).astype(np.int64)
        beyond = ids >= vocab
        ids[beyond] = 0
        values = logits[columns.rows[left, None], ids]
        ratios = _weights(values, columns.maxima[left[:, None], drawn], cuts.temperatures[left, None])
        accepted = (numbers[:, 2] < ratios) & (values >= columns.least[left, None]) & ~beyond
        for n, row_ids, good in zip(left.tolist(), ids, accepted, strict=True):
            tries = row_ids[good]
            if len(tries) and cuts.top_p[n] < 1:
                row, temperature, top_p = logits[columns.rows[n]], float(cuts.temperatures[n]), float(cuts.top_p[n])
                nucleus = _Nucleus(row, columns.peaks[n], columns.least[n], temperature, top_p, memory)
                tokens[n] = nucleus.first(tries)
            elif len(tries):
                tokens[n] = tries[0]
    return tokens


def _draw_from_few(logits: Floats, rows: Ids, cuts: RowCuts, memory: DrawingBuffers) -> Ids:
    """`draw`, by passes over all of each row.

    Where top_p cuts, a token of what min_p and top_k leave is drawn until one is in the nucleus.
    """
    vocab = logits.shape[1]
    tokens = np.full(len(rows), -1)
    numbers = uniforms(cuts.keys, 1, _TRIES_FROM_FEW).tolist()
    spans = np.zeros((-(-vocab // _SPAN), _SPAN), np.float32)
    padded = spans.reshape(-1)
    weights = padded[:vocab]
    columns = (rows, cuts.temperatures, cuts.top_k, cuts.top_p, cuts.min_p)
    settings = zip(*(values.tolist() for values in columns), strict=True)
    with np.errstate(over="ignore", under="ignore"):
        for n, (index, temperature, top_k, top_p, min_p) in enumerate(settings):
            row = logits[index]
            peak = row.max()
            if not np.isfinite(peak):
                continue
            np.subtract(row, peak, out=weights)
            np.multiply(weights, np.float32(1 / temperature), out=weights)
            np.exp(weights, out=weights)
            if min_p > 0:
                weights[row < np.float32(peak + temperature * math.log(min_p))] = 0
            if top_k < vocab:
                weights[_beyond_rank(row, top_k)] = 0
            sums = spans.sum(axis=1).cumsum(dtype=np.float64)
            total = float(sums[-1])
            for number in numbers[n]:
                token = _at(spans, sums, number * total)
                # A sum that was rounded may lead to a token that was left out.
                if not padded[token]:
                    continue
                if top_p >= 1 or float(_likelier(row, token, memory).dot(weights)) < top_p * total:
                    tokens[n] = token
                    break
            else:
                tokens[n] = _draw_from_all(row, cuts[np.array([n])])
    return tokens


def _at(spans: Floats, sums: Doubles, weight: float) -> int:
    """The token at which the sum of weights, laid out in spans, exceeds `weight`. `sums`: of the spans, up to each."""
    span = min(int(sums.searchsorted(weight, "right")), len(sums) - 1)
    before = float(sums[span - 1]) if span else 0.0
    place = int(spans[span].cumsum(dtype=np.float64).searchsorted(weight - before, "right"))
    return span * _SPAN + min(place, _SPAN - 1)


def _beyond_rank(row: Floats, rank: int) -> Ids:
    """The tokens of a row that are not among the `rank` likeliest."""
    floor = np.partition(row, len(row) - rank)[len(row) - rank]
    ties = np.flatnonzero(row == floor)
    return np.concatenate([np.flatnonzero(row < floor), ties[rank - np.count_nonzero(row > floor) :]])


def _likelier(row: Floats, token: int, memory: DrawingBuffers) -> npt.NDArray[np.bool_]:
    """`memory.mask`, which says what is likelier than this token, or as likely and before it."""
    logit, mask = row[token], memory.mask
    np.greater_equal(row[:token], logit, out=mask[:token])
    np.greater(row[token:], logit, out=mask[token:])
    return mask


_LN2 = float(np.log(2.0))
_EXCESS = 1.062
"""2^floor(z) * (1 + z - floor(z)) is at least 2^z and at most 1.0615 * 2^z; the rest is for rounding."""
_SUM_ERROR = 1e-3
"""Of a sum in float32 that runs through the vocabulary, in parts of the sum: far more than it can be."""


class _Nucleus:
    """Tells which tokens of a row top_p keeps: those with less than top_p of the weight on likelier ones.

    This is mostly told from weights that are too large by up to 6 %, and cost a third of what exact ones do: the bits
    of a float32, taken as an integer, grow with its logarithm, linearly between powers of two (Schraudolph 1999).
    """

    def __init__(
        self, row: Floats, peak: np.float32, least: np.float32, temperature: float, top_p: float, memory: DrawingBuffers
    ) -> None:
        """`row` [vocab], the largest logit and the least one that min_p keeps."""
        self._row, self._peak, self._least, self._memory = row, peak, least, memory
        self._temperature, self._top_p = temperature, top_p
        self._weights = memory.ints.view(np.float32)
        # The logit whose weight has the bits of 0: 2^-127 of the largest.
        zero = np.float32(float(peak) - 127 * _LN2 * temperature)
        # Where float32 has too few digits for logits divided by the temperature, nothing is gained by bounds.
        self._exact = bool(np.spacing(abs(zero)) > 1e-4 * temperature)
        if self._exact:
            self._weigh_exactly()
        else:
            np.subtract(row, zero, out=memory.floats)
            np.maximum(memory.floats, memory.zeros, out=memory.floats)
            np.multiply(memory.floats, np.float32(2**23 / _LN2 / temperature), out=memory.floats)
            np.copyto(memory.ints, memory.floats, casting="unsafe")
            self._cut()

    def first(self, tokens: Ids) -> int:
        """The first of these tokens that is kept, -1 if none is."""
        edge = (np.inf, -1)
        for token in tokens.tolist():
            place = (-float(self._row[token]), token)
            # What is not likelier than a token outside is outside, too.
            if edge == (np.inf, -1) or place < edge:
                if self._contains(token):
                    return int(token)
                edge = place
        return -1

    def _contains(self, token: int) -> bool:
        above = self._weight_above(token)
        if not self._exact:
            rest, error = self._total - above, _SUM_ERROR * self._total
            if (1 - self._top_p) * (above + error) * _EXCESS < self._top_p * (rest - error):
                return True
            if (1 - self._top_p) * (above - error) > self._top_p * (rest + error) * _EXCESS:
                return False
            self._weigh_exactly()
            above = self._weight_above(token)
        return above < self._top_p * self._total

    def _weigh_exactly(self) -> None:
        self._exact = True
        with np.errstate(over="ignore", under="ignore"):
            np.subtract(self._row, self._peak, out=self._weights)
            np.multiply(self._weights, np.float32(1 / self._temperature), out=self._weights)
            np.exp(self._weights, out=self._weights)
        self._cut()

    def _cut(self) -> None:
        """Leaves out what min_p does."""
        if self._least > -np.inf:
            np.greater_equal(self._row, self._least, out=self._memory.mask)
            np.multiply(self._weights, self._memory.mask, out=self._weights)
        self._total = self._sum(self._weights)

    def _weight_above(self, token: int) -> float:
        """Of the tokens before it, in order."""
        memory = self._memory
        np.copyto(memory.floats, _likelier(self._row, token, memory))
        np.multiply(memory.floats, self._weights, out=memory.floats)
        return self._sum(memory.floats)

    def _sum(self, values: Floats) -> float:
        # The sum of numpy is by pairs and exact to six digits; einsum's takes a third of the time.
        return float(values.sum() if self._exact else np.einsum("i->", values))
