"""Load tests and benchmarks. Speaks only public protocols; the micro benchmarks time the rooms' data structures."""
