"""From token ids to text, token by token as they are generated."""

from __future__ import annotations

from functools import partial

from benchmarks.micro.benchmark import Benchmark, Work

_TOKENS = 2048
"""Of all streams together."""


def _incremental(kind: str, streams: int) -> Work:
    """`streams` texts advance in turns. With the demo model's tokenizer characters beyond ASCII are several tokens, of
    which all but the last are held back."""
    from benchmarks.micro.suite.texts import demo_tokenizer, text
    from penstock.tokenizers import IncrementalDetokenizer

    tokenizer = demo_tokenizer()
    count = _TOKENS // streams
    steps = [[token_id] for token_id in tokenizer.encode(text(kind, 4 * _TOKENS))[:count]]
    if len(steps) != count:
        raise RuntimeError("the text is too short")

    def run() -> None:
        pushes = [IncrementalDetokenizer(tokenizer).push for _ in range(streams)]
        for step in steps:
            for push in pushes:
                push(step)

    return Work(run, _TOKENS)


BENCHMARKS = tuple(
    Benchmark(f"detokenizer/{kind}-{streams}", "token", partial(_incremental, kind, streams))
    for kind in ("ascii", "cjk", "emoji")
    for streams in (1, 64)
)
