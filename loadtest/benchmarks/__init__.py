"""Benchmarks that are run from a checkout: `python loadtest/benchmarks COMMAND`. The wheel has nothing of them."""

COMMAND = ("python", "loadtest/benchmarks")
"""What users type in the checkout's root."""
