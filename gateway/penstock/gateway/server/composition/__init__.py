"""The composition root: how configuration, models, data plane and fronts fit together."""
