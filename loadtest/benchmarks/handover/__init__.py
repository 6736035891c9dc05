"""A benchmark of replicas that compute prompts for other ones: `python loadtest/benchmarks handover`."""
