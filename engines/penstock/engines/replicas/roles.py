"""Replicas that compute prompts for others, which go on with the keys and values of these. Plain data."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.replicas.routing import RoutedRequest, Router
from penstock.engines.replicas.sample import Sample, is_untouched


class Roles:
    """The first `num_prefill` replicas compute prompts, the others go on with them. That is a preference: where none of
    its kind can take a request, one of the other kind does all of it."""

    def __init__(self, num_prefill: int, min_tokens: int) -> None:
        """`min_tokens`: a prompt of which less has to be computed goes to a decode replica at once. Without prefill
        replicas nothing is handed over."""
        self.num_prefill = num_prefill
        self._min_tokens = min_tokens

    def is_prefill(self, replica: int) -> bool:
        return replica < self.num_prefill

    def name(self, replica: int) -> str:
        if not self.num_prefill:
            return "any"
        return "prefill" if self.is_prefill(replica) else "decode"

    def sorted(
        self, ranked: Sequence[int], samples: Sequence[Sample], routed: RoutedRequest, router: Router
    ) -> list[int]:
        """These replicas, the best one first: those of the kind that it needs now in their order, then the others."""
        if not self.num_prefill:
            return list(ranked)
        begins = not any(sample.tokens for sample in samples) and self._is_long(ranked, routed, router)
        return sorted(ranked, key=lambda replica: self.is_prefill(replica) != begins)

    def _is_long(self, ranked: Sequence[int], routed: RoutedRequest, router: Router) -> bool:
        decode = [replica for replica in ranked if not self.is_prefill(replica)]
        to_compute = (router.to_compute(routed, replica) for replica in decode)
        return min(to_compute, default=routed.num_tokens) >= self._min_tokens

    def hands_over(self, replica: int, able: Sequence[int], samples: Sequence[Sample]) -> bool:
        """The replica gives these samples their first token, and another one of those that are able goes on. Not where
        nothing comes behind the first token."""
        params = samples[0].message.params
        return (
            self.is_prefill(replica)
            and not all(self.is_prefill(other) for other in able)
            and is_untouched(samples)
            and isinstance(params, SamplingParams)
            and params.max_tokens > 1
        )
