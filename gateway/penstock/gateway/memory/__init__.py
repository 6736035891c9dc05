"""How much memory models take, and who gets it."""
