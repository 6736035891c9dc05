"""The benchmarks. What they time is imported when they are set up, so that listing them costs nothing."""
