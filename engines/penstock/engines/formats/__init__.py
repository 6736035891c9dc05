"""Files that models and adapters come in."""
