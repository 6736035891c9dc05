"""Which outputs a batch needs, for backends to which each of them costs something."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from penstock.classic.base import InferCall


def wanted_outputs(calls: Iterable[InferCall], outputs: Sequence[str], states: Collection[str] = ()) -> Sequence[str]:
    """Those of `outputs` that some request of the batch asked for, in this order, and always `states`: the outputs
    that the server keeps for sequences."""
    wanted: set[str] = set()
    for call in calls:
        if not call.request.outputs:
            return outputs
        wanted.update(call.request.outputs)
    return [name for name in outputs if name in wanted or name in states]
