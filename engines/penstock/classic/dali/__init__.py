"""Pipelines of NVIDIA DALI, which decode and prepare images, sound and other data."""
