"""The simulated engine: no weights, deterministic tokens, a latency model. For tests, load tests, capacity planning."""

from penstock.engines.simulated.batcher import SimulatedBatcher, SimulatedBatcherConfig
from penstock.engines.simulated.own_thread import OwnThread
from penstock.engines.simulated.runner import LatencyModel, SimulatedConfig, SimulatedRunner

__all__ = [
    "LatencyModel",
    "OwnThread",
    "SimulatedBatcher",
    "SimulatedBatcherConfig",
    "SimulatedConfig",
    "SimulatedRunner",
]
