"""Language models that other servers have: asked by OpenAI's API, text for text."""
