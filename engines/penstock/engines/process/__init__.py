"""The process border: an engine in a process of its own, spawned, watched and restarted."""

from penstock.engines.process.client import ProcessEngine
from penstock.engines.process.liveness import WatchdogConfig

__all__ = ["ProcessEngine", "WatchdogConfig"]
