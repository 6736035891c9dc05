"""Penstock beside other servers, on one machine and the same models: sets them up, starts, measures, writes tables."""
