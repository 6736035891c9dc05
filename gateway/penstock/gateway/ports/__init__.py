"""What listens: the HTTP apps, put together from the protocols, and what they answer for operators and probes."""
