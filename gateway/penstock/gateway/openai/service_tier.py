"""OpenAI's service tiers, as levels of the scheduling policy `priority`."""

from __future__ import annotations

from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.dataplane import GenerateRequest
from penstock.gateway.openai.schemas import ServiceTier

_LEVELS = {"flex": 1, "priority": -1, "fast": -1}
"""Lower runs earlier. The other tiers are level 0."""


_KNOWN = ("auto", "default", "scale", *_LEVELS)


def note_tier(tier: ServiceTier | None, context: RequestContext) -> None:
    """One that this server does not know is the default."""
    if tier is not None and tier not in _KNOWN:
        context.ignore("service_tier", f"it must be one of {', '.join(_KNOWN)}.")


def tier_priority(tier: ServiceTier | None, policy: str) -> int:
    """Of requests that name no `priority` themselves. Under other policies all tiers are alike."""
    return _LEVELS.get(tier or "", 0) if policy == "priority" else 0


def real_tier(tier: ServiceTier | None, wanted: GenerateRequest) -> str:
    """How the request is really served, in OpenAI's words: a key may keep its requests from running early."""
    asked, level = _LEVELS.get(tier or "", 0), wanted.level
    if asked < 0 and level < 0:
        return "priority"
    return "flex" if asked > 0 and level > 0 else "default"
