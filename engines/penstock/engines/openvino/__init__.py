"""The OpenVINO runner: decoders built straight from config.json and safetensors around the paged-attention op.

Torch-free. `runner.OpenVINORunner` is the way in; `families` lists what can be run, and is where a family is added.
"""
