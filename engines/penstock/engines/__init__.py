"""The engines, which run models: scheduler, engine core, the runners behind them, and the gateway's client."""

__version__ = "0.1.0"
"""Of everything in this repository, and its only place: `pyproject.toml` and `penstock.__version__` read it here."""
