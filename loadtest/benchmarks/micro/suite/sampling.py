"""Choosing tokens from logits: 32 rows of a vocabulary of 151,936, in one thread."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.micro.benchmark import Benchmark, Work

_ROWS, _VOCAB = 32, 151_936


def _sample(peaked: bool, **settings: Any) -> Work:
    """Flat: logits as of random weights. Peaked: most of the probability is on twenty tokens, as with trained ones."""
    import numpy as np

    from penstock.engines.contract.messages import SamplingParams
    from penstock.engines.kit.sampling import Sampler, SamplingState

    rng = np.random.default_rng(1)
    logits = rng.standard_normal((_ROWS, _VOCAB), np.float32) * np.float32(2.5 if peaked else 0.6)
    if peaked:
        logits[:, rng.choice(_VOCAB, 20, replace=False)] = 14 + 2 * rng.standard_normal((_ROWS, 20), np.float32)
    params = SamplingParams(max_tokens=1, **settings)
    prompt = list(range(512))
    states = [SamplingState.create(params, seed, (0,), prompt, []) for seed in range(_ROWS)]
    sampler = Sampler(_VOCAB)

    def run() -> None:
        if min(sampler.sample(logits, states)) < 0:
            raise RuntimeError("these logits are finite")

    return Work(run, _ROWS)


def _logprobs() -> Work:
    import numpy as np

    from penstock.engines.kit.sampling import token_logprobs_rows

    logits = np.random.default_rng(1).standard_normal((_ROWS, _VOCAB), np.float32)
    tokens = logits.argmax(axis=1)

    def run() -> None:
        token_logprobs_rows(logits, tokens, 5)

    return Work(run, _ROWS)


_NUCLEUS = {"temperature": 0.7, "top_p": 0.9}

BENCHMARKS = (
    Benchmark("sample/greedy", "row of 151,936", partial(_sample, False, temperature=0.0)),
    Benchmark("sample/temperature-flat", "row of 151,936", partial(_sample, False, temperature=1.0)),
    Benchmark("sample/top-p-flat", "row of 151,936", partial(_sample, False, **_NUCLEUS)),
    Benchmark("sample/top-p-peaked", "row of 151,936", partial(_sample, True, **_NUCLEUS)),
    Benchmark("sample/top-k-top-p-flat", "row of 151,936", partial(_sample, False, top_k=50, **_NUCLEUS)),
    Benchmark("sample/min-p-flat", "row of 151,936", partial(_sample, False, min_p=0.05)),
    Benchmark("sample/penalties-peaked", "row of 151,936", partial(_sample, True, repetition_penalty=1.1, **_NUCLEUS)),
    Benchmark("sample/logprobs-5", "row of 151,936", _logprobs),
)
