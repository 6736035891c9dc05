"""A benchmark of how servers keep to JSON schemas: `python loadtest/benchmarks schemas`."""
