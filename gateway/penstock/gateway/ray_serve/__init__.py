"""Replicas of a server on a Ray cluster, behind Ray Serve. Nothing else imports this package, and only a part of it
imports Ray."""
