"""What fronts that generate text share: the way of a call, its stream, and what looks for parts in its answer."""
