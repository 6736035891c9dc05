"""Entry of the decoders that can be run: config.json -> DecoderSpec. A new family is a function in one of the modules
that are imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.model_settings import TEXT_PARTS, text_settings
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.kit.cache_size import check_model_sizes
from penstock.engines.openvino import (  # noqa: F401  they register themselves
    families_dense,
    families_early,
    families_experts,
    families_gemma,
    families_hybrid,
    families_kin,
    families_latent,
    families_mamba,
    families_shared_experts,
    families_sliding_experts,
)
from penstock.engines.openvino.decoder_spec import DecoderSpec
from penstock.engines.openvino.families_refused import REFUSED_FAMILIES
from penstock.engines.openvino.family import FAMILIES, LIMIT, LOGITS_CAP, SCORE_CAP, DecoderFamily

_REFUSED = {
    "text_config": "multimodal models",
    SCORE_CAP: "soft-capped attention",
    LOGITS_CAP: "soft-capped logits",
    "use_bidirectional_attention": "models that attend to later tokens",
    "qk_layernorm": "norms of queries and keys in this family",
    "use_qk_norm": "norms of queries and keys in this family",
    "use_cla": "layers that share keys and values",
    LIMIT: "queries, keys and values with a limit",
    "scale_attn_by_inverse_layer_idx": "attention scaled by the layer",
    "add_cross_attention": "models that attend to an encoder",
    "apply_residual_connection_post_layernorm": "residuals behind the norm",
    "alibi": "ALiBi in this family",
}
"""Settings that change the computation, and that only some families read, if any."""


def parse_config(config: Mapping[str, Any], max_model_len: int | None = None) -> DecoderSpec:
    """`config` is config.json; `max_model_len`, the longest context that is wanted. Raises UnsupportedError,
    naming what is not supported and what is."""
    config = text_settings(config)
    family = _family(config)
    for key, meaning in _REFUSED.items():
        value = config.get(key)
        if value is not None and value is not False and key not in family.known:
            raise UnsupportedError(f"config.json has {key}: {meaning} are not supported")
    parse_scheme(config)
    check_model_sizes(config)
    try:
        return family.read({**config, "max_model_len": max_model_len})
    except KeyError as e:
        raise UnsupportedError(f"config.json lacks {e.args[0]!r}") from None


def _family(config: Mapping[str, Any]) -> DecoderFamily:
    names = config.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    remote = "; its own code (auto_map) is never run" if "auto_map" in config else ""
    reason = next((f": {REFUSED_FAMILIES[name]}" for name in names if name in REFUSED_FAMILIES), "")
    raise UnsupportedError(
        f"architecture {', '.join(names) or 'unnamed'} is not supported by the openvino runner{reason}{remote}; "
        f"supported are {', '.join((*FAMILIES, *TEXT_PARTS))}"
    )
