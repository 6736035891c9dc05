"""vLLM: its workers and kernels under our scheduler, block tables and prefix cache, or under its own scheduler.

`loading.load` and `loading.load_batcher` are the ways in: they check the installed version and set the environment
before vLLM is imported.
"""
