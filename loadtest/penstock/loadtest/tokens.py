"""The counts of tokens that a report rests on: who counted them, what the prompts came to beside what was asked for,
and what came from the prefix cache."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options
from penstock.loadtest.report.model import ServerWatch
from penstock.loadtest.workload.contents import CHATS
from penstock.loadtest.workload.mixes import shares

_CLEARLY = 0.05
"""Of what was asked for: a difference in the mean from here on is told in words."""


_CACHE = (
    ("penstock_prefix_cache_queries_total", "penstock_prefix_cache_hits_total"),
    ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
)
"""Counters of servers: prompt tokens that were looked up in the prefix cache, and those found."""


def token_counts(samples: Sequence[Sample], options: Options, server: ServerWatch | None = None) -> dict[str, Any]:
    """Of complete requests; empty where there are no tokens.

    `output_from`, `prompt_from`: who counted. `prompt_asked` and `prompt_counted`: means over the requests of which
    both are known. `prompt_cached`: share that the server had in its prefix cache, where it says so. `note`: what a
    reader should know of that.

    That prompts come out longer than was asked for is no reason to doubt the figures, which are of the server's own
    counts; and prompts are not fitted to what the server counts, as then two servers would get different ones.
    """
    good = [sample for sample in samples if not sample.error]
    counts: dict[str, Any] = {}
    if any(sample.tokens for sample in good):
        by_server = sum(sample.output_tokens is not None for sample in good)
        counts["output_from"] = _source(by_server, len(good), "pieces of the streams")
    if not any(sample.prompt_tokens or sample.asked_prompt_tokens for sample in good):
        return counts
    by_server = sum(sample.prompt_tokens is not None for sample in good)
    known = all(sample.wanted_prompt_tokens is not None for sample in good if sample.prompt_tokens is None)
    counts["prompt_from"] = _source(by_server, len(good), "the tokenizer" if known else "nobody")
    if (cached := _cached(server)) is not None:
        counts["prompt_cached"] = cached
    both = [sample for sample in good if sample.asked_prompt_tokens and sample.prompt_tokens is not None]
    note = ""
    if both:
        requested = statistics.fmean(sample.asked_prompt_tokens or 0 for sample in both)
        counted = statistics.fmean(sample.prompt_tokens or 0 for sample in both)
        counts |= {"prompt_asked": round(requested, 1), "prompt_counted": round(counted, 1)}
        if abs(counted - requested) > _CLEARLY * requested:
            note = f"prompts had {counted:.0f} tokens on average as the server counts, {requested:.0f} were asked for"
            note += _reason(options)
    elif by_server < len(good) and not known:
        note = "prompt tokens were not counted, so the total has output tokens only; --tokenizer counts them"
    return counts | ({"note": note} if note else {})


def cached_own(tokens: Mapping[str, Any], options: Options) -> float:
    """Share of the prompt tokens that came from the server's prefix cache though no two prompts of the workload begin
    alike; 0 where they may. As many as the server counts beyond what was asked for may be a template's, which is
    always the same."""
    alike = any(
        part.options.dataset or part.options.turns > 1 or part.options.shared_prefix_tokens
        for part in shares(options.workload)
    )
    if alike or options.workload.trace is not None:
        return 0.0
    template = 1.0 - tokens["prompt_asked"] / tokens["prompt_counted"] if tokens.get("prompt_counted") else 0.0
    return max(0.0, float(tokens.get("prompt_cached", 0.0)) - max(0.0, template))


def _cached(server: ServerWatch | None) -> float | None:
    counters = server.counters if server is not None else {}
    for queries, hits in _CACHE:
        if counters.get(queries):
            return round(counters.get(hits, 0.0) / counters[queries], 3)
    return None


def _source(by_server: int, requests: int, else_from: str) -> str:
    if by_server == requests:
        return "the server"
    return f"the server in {by_server} of {requests} answers, else {else_from}" if by_server else else_from


def _reason(options: Options) -> str:
    chat = options.target.protocol in CHATS
    if options.workload.tokenizer is None:
        return ": without --tokenizer a token is a word" + (", and a chat's template adds its own" if chat else "")
    return ": a chat's template adds its own" if chat else ""
