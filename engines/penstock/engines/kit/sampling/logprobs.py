"""Log-probabilities at one position, of the model's own distribution."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import TokenLogprobs
from penstock.engines.kit.sampling.truncation import largest


def token_logprobs(logits: npt.NDArray[np.float32], token_id: int, top: int) -> TokenLogprobs:
    """`logits` [vocab], unscaled. `top` likeliest tokens, by probability and then by id."""
    peak = logits.max()
    with np.errstate(over="ignore", under="ignore"):
        total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    best = largest(logits, top)
    best = best[np.lexsort((best, -logits[best]))]
    values = logits[best].astype(np.float64) - total
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logits[token_id]) - total,
        rank=1 + int(np.count_nonzero(logits > logits[token_id])),
        top=list(zip(best.tolist(), values.tolist(), strict=True)),
    )
