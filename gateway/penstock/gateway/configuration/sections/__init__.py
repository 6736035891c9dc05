"""The sections of the configuration tree: each setting's type, bounds, default and description stand here once."""
