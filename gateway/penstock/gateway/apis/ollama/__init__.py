"""Ollama's API, for tools that speak nothing else: https://github.com/ollama/ollama/blob/main/docs/api.md."""
