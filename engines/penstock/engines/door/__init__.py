"""The door: an engine process serves processes that did not start it, on this machine or on others."""
