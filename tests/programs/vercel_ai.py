"""Vercel's AI SDK with three providers, over four APIs: vercel_ai.mjs."""

from __future__ import annotations

from collections.abc import Iterator

from kit import KEY, Place, check, main, server
from scripted import Call, scripted

VERSION = "7.0.173"
PROVIDERS = ("@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105", "@ai-sdk/openai-compatible@3.0.92")


def install(place: Place) -> None:
    place.npm(f"ai@{VERSION}", *PROVIDERS, "zod@4.6.7")


def converse(place: Place) -> Iterator[str]:
    call = Call("weather", {"city": "Rome"})
    with scripted("It is warm.", call) as model, server("penstock-demo", "--upstream", model.flag) as running:
        yield place.node("vercel_ai.mjs", URL=running.url, KEY=KEY, AI_SDK_LOG_WARNINGS="false").strip()
        check(model.results() == ["Rome: 18 degrees"], "the model gets the tool's result", model.results())


if __name__ == "__main__":
    main(f"Vercel AI SDK {VERSION}", install, converse)
