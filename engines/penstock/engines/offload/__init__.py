"""The tier behind the KV cache: evicted blocks in files, read again for requests that begin alike."""

CLOSING_SECONDS = 5.0
"""That may be spent at an engine's end on writing what is still in memory."""
WRITING_BYTES = 256 << 20
"""Of memory, for blocks that wait to be written: more are dropped."""
READING_BYTES = 512 << 20
"""Of memory, for blocks that have been read and wait for their request to run."""
