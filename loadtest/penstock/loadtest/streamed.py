"""Which answers come piece by piece, and what only those have."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Target

_WHOLE = frozenset({"openai-embeddings", "kserve-http", "kserve-http-binary", "kserve-grpc"})
"""Protocols whose answers always come at once."""
_OF_STREAMS = ("ttft", "itl", "tpot")


def is_streamed(target: Target) -> bool:
    return target.stream and target.protocol not in _WHOLE


def check_latencies(target: Target, names: Iterable[str], what: str) -> None:
    """`names`: latencies that the setting `what` bounds. Raises LoadTestError for those that a whole answer does not
    have: all of it comes at its end, which is e2e."""
    if is_streamed(target):
        return
    whose = f"{target.protocol} has" if target.protocol in _WHOLE else "answers that are not streamed have"
    for name in names:
        if name in _OF_STREAMS:
            raise LoadTestError(f"{what}: {whose} no {name}, only e2e")
