"""The report of a run, written in several forms."""
