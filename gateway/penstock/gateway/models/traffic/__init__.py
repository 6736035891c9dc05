"""Public names that several models serve: weights, shadows, and shifts from one model to another (docs/traffic.md)."""
