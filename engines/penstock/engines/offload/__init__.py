"""The tier behind the KV cache: evicted blocks in files, read again for requests that begin alike."""

CLOSING_SECONDS = 5.0
"""That may be spent at an engine's end on writing what is still in memory."""
