"""Classic models for several front processes: the process that owns the models serves them over a unix socket."""
