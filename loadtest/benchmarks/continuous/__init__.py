"""What continuous batching is worth: `python loadtest/benchmarks continuous`."""
