"""Tokenizers out of the metadata of GGUF files."""

from .metadata import end_token_ids_of, tokenizer_config_of, tokenizer_of

__all__ = ["end_token_ids_of", "tokenizer_config_of", "tokenizer_of"]
