"""The vLLM runner: vLLM's workers and kernels under our scheduler, our block tables and our prefix cache.

`loading.load` is the way in: it checks the installed version and sets the environment before vLLM is imported.
"""
