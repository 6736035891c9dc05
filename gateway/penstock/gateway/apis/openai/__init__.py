"""The OpenAI API: schemas, routes, streams."""
