"""Micro benchmarks of what stands between a request and its tokens: `penstock bench micro`."""
