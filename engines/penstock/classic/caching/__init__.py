"""The response cache: answers of models that are kept and given again to requests with the same inputs."""
