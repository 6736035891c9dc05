"""Ragged batches: requests of different shapes in one execution."""
