"""The process border: an engine in a process of its own, spawned, watched and restarted."""
