"""What runs a model: the scheduler, the engine core, and the runners behind them."""

__version__ = "0.1.0"
"""Of everything in this repository, and its only place: `pyproject.toml` and `penstock.__version__` read it here."""
