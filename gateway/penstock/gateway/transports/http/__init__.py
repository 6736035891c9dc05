"""The hardened HTTP server: limits, keys, drain, health. Protocol bodies live in the rooms beside it."""
