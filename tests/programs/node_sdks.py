"""The SDKs of OpenAI and Anthropic for Node: node_sdks_openai.mjs and node_sdks_anthropic.mjs."""

from __future__ import annotations

from collections.abc import Iterator

from kit import KEY, Place, main, server

OPENAI, ANTHROPIC = "7.59.0", "1.14.0"
TRIES_THREADS = r"POST /v1/messages 400 "
"""Anthropic's tool runner first tries a thread that the server would keep, then goes on without."""


def install(place: Place) -> None:
    place.npm(f"openai@{OPENAI}", f"@anthropic-ai/sdk@{ANTHROPIC}", "zod@4.6.7")


def converse(place: Place) -> Iterator[str]:
    with server("penstock-demo", may_refuse=TRIES_THREADS) as running:
        for script in ("node_sdks_openai.mjs", "node_sdks_anthropic.mjs"):
            yield place.node(script, URL=running.url, KEY=KEY).strip()


if __name__ == "__main__":
    main(f"openai {OPENAI} and @anthropic-ai/sdk {ANTHROPIC} for Node", install, converse)
