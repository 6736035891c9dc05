"""The replicas of one model: the engines that belong to them, and whether they give the same tokens. Plain data."""

from __future__ import annotations

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import EngineError, NotReadyError

_SAME = (
    "vocab_size",
    "eos_token_ids",
    "supports_logprobs",
    "supports_pooling",
    "supports_drafts",
    "supports_grammars",
    "supports_processors",
)
"""What a request may rely on, wherever it goes."""


class Membership:
    def __init__(self) -> None:
        self._infos: dict[int, ModelInfo] = {}
        self._fingerprints: dict[int, str] = {}

    def join(self, number: int, info: ModelInfo, fingerprint: str) -> None:
        """Replica `number` is there, perhaps again. Raises EngineError where a request could rely on something that it
        does not have, and the others do, or the other way round: then it is no member."""
        self._infos.pop(number, None)
        self._fingerprints.pop(number, None)
        for other, known in self._infos.items():
            for name in _SAME:
                if getattr(info, name) != getattr(known, name):
                    raise EngineError(f"replica {number} differs from replica {other} in its {name}: it is left out")
        self._infos[number], self._fingerprints[number] = info, fingerprint

    def __contains__(self, number: int) -> bool:
        return number in self._infos

    @property
    def info(self) -> ModelInfo:
        """Of the member with the least room for one request: what fits there fits everywhere. Raises NotReadyError."""
        if not self._infos:
            raise NotReadyError("The model is still loading.", retry_after=1)
        return min(self._infos.values(), key=lambda info: info.context_length)

    def fingerprint(self, number: int) -> str:
        """Of a member."""
        return self._fingerprints[number]

    def num_blocks(self, number: int) -> int:
        """Of its KV cache; what is not known is as the smallest."""
        return self._infos.get(number, self.info).num_blocks

    @property
    def can_resume(self) -> bool:
        """Whether one can go on with what another has begun: they compute the same."""
        return bool(self._infos) and not self.why_not_resumed

    @property
    def why_not_resumed(self) -> str:
        """In words for the operator; empty: nothing is against it."""
        if not all(info.supports_resume for info in self._infos.values()):
            return "an engine that uses its own scheduler cannot go on with what another has begun"
        if len(set(self._fingerprints.values())) > 1:
            return "the replicas' engines, or their settings, differ"
        return ""
