"""SentencePiece vocabularies of GGUF files: tokenizer.ggml.model is llama.

Such a file has a score for each token and no merges: of all neighbours that make a token, those whose token has the
highest score are merged first. As BPE has it, each pair of tokens that make a third is a merge, in the order of the
scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

from ..errors import TokenizerError
from ..one_call import is_of_the_library
from .vocabulary import Vocabulary

_SPACE = "▁"


def sentencepiece_tokenizer(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Tokenizer:
    """Without special tokens. Raises TokenizerError."""
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.get(f"tokenizer.ggml.{key}"):
            raise TokenizerError(f"the GGUF file has tokenizer.ggml.{key}, which is not supported")
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.texts):
        raise TokenizerError("the GGUF file has no tokenizer.ggml.scores for its tokens")
    try:
        model = models.BPE(
            vocabulary.ids,
            list(_merges(vocabulary, scores)),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=vocabulary.texts[metadata.get("tokenizer.ggml.unknown_token_id", 0)],
        )
    except BaseException as error:
        if not is_of_the_library(error):
            raise
        raise TokenizerError(f"the GGUF file's vocabulary cannot be used: {error}") from None
    tokenizer = Tokenizer(model)
    begins = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if begins else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if begins else parts)
    return tokenizer


def _merges(vocabulary: Vocabulary, scores: list[float]) -> Iterator[tuple[str, str]]:
    ids, own = vocabulary.ids, vocabulary.control | vocabulary.user_defined
    by_score = sorted((i for i in ids.values() if i not in own), key=lambda i: (-scores[i], i))
    for token_id in by_score:
        text = vocabulary.texts[token_id]
        for cut in range(1, len(text)):
            if text[:cut] in ids and text[cut:] in ids:
                yield text[:cut], text[cut:]
