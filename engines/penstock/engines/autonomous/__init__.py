"""Engines with a scheduler of their own, and the admission queue that stands in front of them."""
