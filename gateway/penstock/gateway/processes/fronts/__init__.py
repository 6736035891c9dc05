"""Several processes that speak the protocols, and one that has everything they share."""
