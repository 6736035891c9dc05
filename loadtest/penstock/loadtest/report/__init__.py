"""What comes of a run: one Report, written in several forms."""
