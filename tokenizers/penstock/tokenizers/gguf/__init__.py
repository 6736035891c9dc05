"""Tokenizers out of the metadata of GGUF files."""

from .metadata import tokenizer_config_of, tokenizer_of

__all__ = ["tokenizer_config_of", "tokenizer_of"]
