"""Triton model repositories: layout, configuration, versions, control modes, hot reload."""
