"""The part that all APIs which generate text share: the way of a call, its stream, the parts of its answer."""
