"""Which engine serves which architecture, as docs/architectures.md: `python loadtest/benchmarks architectures`."""
