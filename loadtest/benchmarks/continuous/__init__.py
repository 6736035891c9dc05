"""A benchmark of continuous batching: `python loadtest/benchmarks continuous`."""
