"""Ensembles: models that the server composes of others, a graph of steps for each request."""
