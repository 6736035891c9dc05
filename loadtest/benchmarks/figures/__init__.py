"""The figures that README.md and docs/performance.md show: `python loadtest/benchmarks figures`."""
