"""Micro benchmarks of what stands between a request and its tokens: `python loadtest/benchmarks micro`."""
