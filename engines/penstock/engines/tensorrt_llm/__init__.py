"""The TensorRT-LLM engine: its LLM API behind our admission queue. Not yet run on a GPU.

`loading.load` is the way in: it checks the installed version before anything of TensorRT-LLM is imported.
"""
