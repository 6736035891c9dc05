"""The simulated engine: no weights, deterministic tokens, a latency model. For tests, load tests, capacity planning."""

from penstock.engines.simulated.runner import LatencyModel, SimulatedConfig, SimulatedRunner

__all__ = ["LatencyModel", "SimulatedConfig", "SimulatedRunner"]
