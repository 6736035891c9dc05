"""Searching text that arrives in pieces for stop strings."""

from __future__ import annotations

from functools import partial

from benchmarks.micro.benchmark import Benchmark, Work

_PIECES = 500
_USUAL = ("\n\n", "###", "</s>", "User:")


def _search(stops: tuple[str, ...], piece: str) -> Work:
    from penstock.tokenizers import StopStrings

    def run() -> None:
        push = StopStrings(stops).push
        for _ in range(_PIECES):
            if push(piece)[1] is not None:
                raise RuntimeError("there is no stop string in this text")

    return Work(run, _PIECES)


BENCHMARKS = (
    Benchmark("stop/none-begins", "piece of 5 characters", partial(_search, _USUAL, " word")),
    Benchmark("stop/often-begins", "piece of 5 characters", partial(_search, _USUAL, "\nUse#")),
    Benchmark("stop/nearly-matches", "piece of 5 characters", partial(_search, ("aaaaaaaaaaaab",), "aaaaa")),
)
