"""The python backend: unmodified TritonPythonModel files, each instance in a process of its own."""
