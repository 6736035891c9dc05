"""Images of requests: from untrusted bytes to what a model's encoder takes, and to their places in a prompt."""
