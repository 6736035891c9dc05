"""What the simulated engine should say: straight from the definition of its digests, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.kvcache import KVGroup

_BITS = 2**64


def _mix(value: int, number: int) -> int:
    value = (value * 0xBF58476D1CE4E5B9 + number) % _BITS
    return value ^ value >> 29


def digests(tokens: Sequence[int], adapter: str = "", groups: Sequence[KVGroup] = (KVGroup(1),)) -> list[int]:
    """Of each position."""
    found: list[int] = []
    for token in tokens:
        found.append(_next(found, token, adapter, groups))
    return found


def _next(found: Sequence[int], token: int, adapter: str, groups: Sequence[KVGroup]) -> int:
    position = len(found)
    total = 0x9E3779B97F4A7C15 ^ crc32(adapter.encode()) ^ token
    for number, group in enumerate(groups):
        if group.window:
            places = list(range(max(0, position - group.window + 1), position))
        else:
            places = [position - 1, (position * 0x9E3779B1 % 2**32 >> 8) % position] if position else []
        total += sum(found[place] ^ number * 0x9E3779B97F4A7C15 % _BITS for place in places)
    return _mix(total, position)


def groups_of(info: ModelInfo) -> tuple[KVGroup, ...]:
    """A recurrent state is what a window of one earlier position would see."""
    return info.kv_groups if info.states is None else (*info.kv_groups, KVGroup(1, 2))


def generate(
    info: ModelInfo,
    prompt: Sequence[int],
    count: int,
    *,
    first_token_id: int = 0,
    adapter: str = "",
    params: SamplingParams | None = None,
    seed: int = 0,
) -> list[int]:
    """The first `count` tokens behind a prompt; greedy ones without `params`."""
    span, groups = info.vocab_size - first_token_id, groups_of(info)
    found = digests(prompt, adapter, groups)
    tokens: list[int] = []
    for number in range(count):
        digest = found[-1]
        if params is not None and params.temperature > 0:
            digest = _mix(digest ^ seed, number)
        tokens.append(first_token_id + (digest >> 13) % span)
        found.append(_next(found, tokens[-1], adapter, groups))
    return tokens


def vector(info: ModelInfo, prompt: Sequence[int]) -> list[float]:
    """What a pooling request gives."""
    digest = digests(prompt, "", groups_of(info))[-1]
    return [(_mix(digest, n) >> 48) / 2**15 - 1 for n in range(16)]
