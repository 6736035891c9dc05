"""When it pays that one replica computes prompts for another one: `python loadtest/benchmarks handover`."""
