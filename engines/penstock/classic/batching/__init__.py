"""Batching: from requests that wait to the batches that instances execute, and back to the callers."""
