"""How servers keep to JSON schemas."""
