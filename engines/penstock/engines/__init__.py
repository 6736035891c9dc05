"""What runs a model: the scheduler, the engine core, and the runners behind them."""
