"""What config.json says of each layer: its window, and how its queries and keys are rotated; and how it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.openvino.rope import Rope, parse_rope, parse_ropes_of_layer_types, settings_in

SCORE_CAP, LOGITS_CAP = CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def renamed(c: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """By usual names, what is there under names of the family's own."""
    return {usual: c[name] if c.get(name) is not None else c[usual] for usual, name in names.items()}


def every_layer(c: Mapping[str, Any]) -> list[int]:
    return [c.get("sliding_window") or 0] * c["num_hidden_layers"]


def upper_layers(c: Mapping[str, Any]) -> list[int]:
    """Qwen's rule: with use_sliding_window, the layers that layer_types names, or all from max_window_layers on."""
    layers = c["num_hidden_layers"]
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    if c.get("layer_types") is None:
        first = count(c, "max_window_layers")
        return [window if n >= first else 0 for n in range(layers)]
    return layers_by_type(c["layer_types"], layers, window)


def all_but_every_nth(c: Mapping[str, Any]) -> list[int]:
    """Gemma 3's rule, and OLMo 3's: the layers that layer_types names, or all but each one that sliding_window_pattern
    ends at."""
    layers, window = c["num_hidden_layers"], c.get("sliding_window") or 0
    kinds = c.get("layer_types")
    if kinds is None:
        pattern = count(c, "sliding_window_pattern") or layers + 1
        kinds = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(layers)]
    return layers_by_type(kinds, layers, window)


def layers_by_type(kinds: Any, layers: int, window: int) -> list[int]:
    known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    if not known or len(kinds) != layers:
        found = f"{len(kinds)} entries for {layers} layers" if known else str(kinds)[:200]
        raise UnsupportedError(
            f"layer_types is not understood: {found}; each layer has full_attention or sliding_attention"
        )
    if "sliding_attention" in kinds and not window:
        raise UnsupportedError("layer_types has sliding_attention, but no sliding window is switched on")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def gemma3_ropes(c: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope]:
    """Older configs scale the rotations of full attention only, and call the other base rope_local_base_freq."""
    whole = {"rope_theta": c.get("rope_theta") or 1e6, **settings_in(c, "rope_scaling")}
    windowed = {"rope_theta": c.get("rope_local_base_freq") or 1e4}
    ropes = parse_ropes_of_layer_types(c, head_dim, {"full_attention": whole, "sliding_attention": windowed})
    return ropes["full_attention"], ropes["sliding_attention"]


def olmo3_ropes(c: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope]:
    """Older configs scale the rotations of full attention only."""
    theta = c.get("rope_theta") or 5e5
    whole = {"rope_theta": theta, **settings_in(c, "rope_scaling")}
    ropes = parse_ropes_of_layer_types(
        c, head_dim, {"full_attention": whole, "sliding_attention": {"rope_theta": theta}}
    )
    return ropes["full_attention"], ropes["sliding_attention"]


def one_rope(c: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope]:
    return (parse_rope(c, head_dim),) * 2


def partial_rope(c: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope]:
    """Perhaps of a part of each head."""
    return (parse_rope(c, head_dim, may_be_partial=True),) * 2


def every_layer_rotates(c: Mapping[str, Any], windows: list[int]) -> list[bool]:
    return [True] * len(windows)


def layers_with_rope(c: Mapping[str, Any], windows: list[int]) -> list[bool]:
    """no_rope_layers has a 1 for each layer that rotates; without it, or if it is empty, each
    no_rope_layer_interval-th does not."""
    given = c.get("no_rope_layers")
    if given is None or given == []:
        interval = count(c, "no_rope_layer_interval") or len(windows) + 1
        return [bool((n + 1) % interval) for n in range(len(windows))]
    if not isinstance(given, list) or len(given) != len(windows) or not all(value in (0, 1) for value in given):
        raise UnsupportedError(f"no_rope_layers is not understood: {str(given)[:100]}; each layer has 0 or 1")
    return [bool(value) for value in given]


def smollm3_windows(c: Mapping[str, Any]) -> list[int]:
    """With use_sliding_window, the layers that layer_types names, or all that do not rotate."""
    layers = c["num_hidden_layers"]
    window = (c.get("sliding_window") or 0) if c.get("use_sliding_window") else 0
    if c.get("layer_types") is not None:
        kinds = layers_by_type(c["layer_types"], layers, c.get("sliding_window") or 0)
        return kinds if window else [0] * layers
    return [0 if turns else window for turns in layers_with_rope(c, [0] * layers)]


def exaone4_windows(c: Mapping[str, Any]) -> list[int]:
    """The layers that layer_types names; without it, sliding_window_pattern is a number, or a text such as LLLG."""
    layers, pattern = c["num_hidden_layers"], c.get("sliding_window_pattern")
    if c.get("layer_types") is None and not c.get("sliding_window"):
        return [0] * layers
    if c.get("layer_types") is None and isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG"):
            raise UnsupportedError(f"sliding_window_pattern is not understood: {pattern[:50]}; it has L and G")
        local = (pattern * layers)[:layers]
        return [(c.get("sliding_window") or 0) if kind == "L" else 0 for kind in local]
    return all_but_every_nth(c)


def exaone4_rotates(c: Mapping[str, Any], windows: list[int]) -> list[bool]:
    """Beside layers with windows, those that attend to all tokens do not rotate."""
    return [bool(window) or not c.get("sliding_window") for window in windows]


def cap_of(c: Mapping[str, Any], key: str) -> float:
    """Of scores or logits; 0: none."""
    return 0.0 if c.get(key) is None else positive(c, key)


def count(c: Mapping[str, Any], key: str) -> int:
    value = c[key]
    if type(value) is not int or value < 0:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is no number of layers")
    return value


def positive(c: Mapping[str, Any], key: str) -> float:
    value = c[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedError(f"config.json has {key}={str(value)[:50]}, which is not a positive number")
    return float(value)
