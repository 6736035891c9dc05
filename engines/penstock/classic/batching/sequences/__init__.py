"""Sequence batching: requests that belong together, kept on one instance in their order."""
