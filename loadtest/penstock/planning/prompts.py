"""The load test's workloads, with prompts that only tell blocks apart: nobody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from random import Random
from typing import Any

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Call
from penstock.loadtest.options import LoadOptions, Options, Target, WorkloadOptions
from penstock.loadtest.workload.build import Sessions, build
from penstock.loadtest.workload.mixes import shares
from penstock.loadtest.workload.vocabulary import Source, load_vocabulary
from penstock.planning.leaping import TOKEN

VOCABULARY = 1 << 62
_OWN, _SHARED, _TEMPLATE = 1 << 40, 1 << 50, TOKEN + 1
"""What prompts of one request, pieces of several, and the template are made of: numbers from there on."""
_BITS = 40


class RepeatedTokens(Source[list[int]]):
    """Each piece is one token again and again, which no other piece has."""

    def piece(self, tokens: int, rng: Random) -> list[int]:
        return [_SHARED + rng.getrandbits(_BITS)] * tokens

    def prompt(
        self, lead: Sequence[list[int]], lead_tokens: int, tokens: int, rng: Random, number: int | None
    ) -> list[int]:
        own = self.piece(tokens, rng) if number is None else [_OWN + number] * tokens
        return [*chain.from_iterable(lead), *own]


def load_options(workload: WorkloadOptions, load: LoadOptions) -> Options:
    return Options(target=Target(url="", model="plan"), workload=workload, load=load)


def sessions(workload: WorkloadOptions, load: LoadOptions) -> Sessions:
    """At the times, and with the lengths, of a load test with these settings. Raises LoadTestError."""
    if any(part.options.dataset for part in shares(workload)):
        if workload.tokenizer is None:
            raise LoadTestError("tokenizer: which one counts the dataset's prompts? (--tokenizer FOLDER)")
    elif workload.tokenizer is not None:
        raise LoadTestError("tokenizer: is only needed to count the prompts of a dataset")
    plain = msgspec.structs.replace(load_options(workload, load))
    return build(plain, source=RepeatedTokens())


def token_ids(call: Call, tokenizer: str | None) -> list[int]:
    """Of the call's own prompt; a dataset's texts are counted, and assumed to be all different."""
    if isinstance(call.prompt, list) and all(isinstance(token, int) for token in call.prompt[:1]):
        return list(call.prompt)  # type: ignore[arg-type]
    counted = load_vocabulary(tokenizer or "").count(_text(call.prompt))
    return [_OWN + call.index] * max(1, counted)


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content", "")) for message in prompt)


def with_template(tokens: list[int], count: int) -> list[int]:
    return tokens + [_TEMPLATE] * count if count else tokens


def answer(tokens: int) -> list[int]:
    """As the engine generates it."""
    return [TOKEN] * tokens
