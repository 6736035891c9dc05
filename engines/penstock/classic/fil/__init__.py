"""Forests of decision trees, computed by the libraries that trained them, or by treelite."""
